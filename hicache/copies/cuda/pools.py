"""A host pool and a GPU's pool made ready for copies: page-locked memory, and the best way that there is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final, cast

import torch

from hicache.copies.copy_choice import CopyChoice
from hicache.copies.cuda.batch import BatchCopy, find_batch_call, try_batch_call
from hicache.copies.cuda.compile import CompiledCopyKernel, address_on_device
from hicache.copies.cuda.kernel import KernelCopy, try_copy_kernel
from hicache.copies.cuda.method import (
    CopyMethod,
    CopyMethodMissing,
    CudaEvent,
    CudaStream,
    Direction,
    PoolPair,
)
from hicache.copies.cuda.row_copy import CopyStreams, CudaRowCopier, MethodChoice
from hicache.copies.runs import RowRuns
from hicache.errors import HostPoolError
from hicache.pool.host_pool import HostPool, RowArray

_REGISTER_FLAGS: Final = 3
"""cudaHostRegisterPortable | cudaHostRegisterMapped: the kernel reads and writes the pool itself."""

_log = logging.getLogger(__name__)


class PinnedPool:
    """A host pool's memory, page-locked for as long as this object is open."""

    def __init__(self, pool: HostPool) -> None:
        """
        Raises:
            HostPoolError: the driver refuses, for example for want of lockable memory.
        """
        self._address = int(pool.memory.ctypes.data)
        self._driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = self._driver.cudaHostRegister(self._address, pool.memory.nbytes, _REGISTER_FLAGS)
        if int(status) != 0:
            raise HostPoolError(
                f"The host prefix cache cannot be page-locked for the GPU (CUDA error {int(status)}): "
                "raise the limit on locked memory (ulimit -l), or lower --hicache-size-gb."
            )

    def close(self) -> None:
        self._driver.cudaHostUnregister(self._address)


class SingleCopies:
    """See `CopyMethod`. One copy of torch's a run: needs nothing, and takes long to start many."""

    def __init__(self, device_rows: torch.Tensor, host_rows: RowArray) -> None:
        self._host = torch.from_numpy(host_rows)
        self._device = device_rows[:, : host_rows.shape[1]]

    def start(self, direction: Direction, runs: RowRuns, stream: CudaStream) -> None:
        assert isinstance(stream, torch.cuda.Stream)
        # The engine's pool may have been made in inference mode, and then changes in it only.
        with torch.inference_mode(), torch.cuda.stream(stream):
            for first_device, first_host, length in zip(*(r.tolist() for r in runs), strict=True):
                device = self._device[first_device : first_device + length]
                host = self._host[first_host : first_host + length]
                target, source = (device, host) if direction == "up" else (host, device)
                target.copy_(source, non_blocking=True)


def open_cuda_row_copier(
    device_rows: torch.Tensor, host_rows: RowArray, choice: CopyChoice
) -> CudaRowCopier:
    """A copier between two pools; compiles the kernel if that was never done here.

    Args:
        device_rows: uint8, shape [rows, at least the host row's bytes], on the current GPU.
        host_rows: uint8, shape [slots, bytes], page-locked.
        choice: the way to copy; `auto` makes do with what there is.

    Raises:
        HostPoolError: the way that is asked for cannot be had.
    """
    device = device_rows.device
    streams = CopyStreams(
        _as_stream(torch.cuda.Stream(device)),  # type: ignore[no-untyped-call]
        _as_stream(torch.cuda.Stream(device)),  # type: ignore[no-untyped-call]
        lambda: _as_stream(torch.cuda.current_stream(device)),
        record_time,
    )
    pools = PoolPair(
        device_rows.data_ptr(),
        device_rows.stride(0),
        int(host_rows.ctypes.data),
        host_rows.shape[1],
    )
    openers: dict[CopyChoice, Callable[[], CopyMethod]] = {
        "batch": lambda: _open_batch(pools, device, streams.up),
        "kernel": lambda: _open_kernel(pools, device, streams.up),
    }
    single = SingleCopies(device_rows, host_rows)
    return CudaRowCopier(choose_methods(choice, openers, single, pools.row_bytes), streams)


def choose_methods(
    choice: CopyChoice,
    openers: Mapping[CopyChoice, Callable[[], CopyMethod]],
    single: CopyMethod,
    row_bytes: int,
) -> MethodChoice:
    """Open what `choice` needs.

    Args:
        choice: of the user.
        openers: how to open `batch` and `kernel`; they raise `CopyMethodMissing`.
        single: what always works.
        row_bytes: bytes of a row.

    Raises:
        HostPoolError: the way that is asked for cannot be had.
    """
    if choice != "auto":
        try:
            method = openers[choice]()
        except CopyMethodMissing as error:
            raise HostPoolError(
                f"--hicache-copy {choice} cannot be had here, because {error}: install the extra 'gpu' of "
                "deepinfer-serve, update the driver, or use --hicache-copy auto."
            ) from error
        return MethodChoice(method, method, row_bytes)
    opened: dict[CopyChoice, CopyMethod] = {}
    missing: list[str] = []
    for name, opener in openers.items():
        try:
            opened[name] = opener()
        except CopyMethodMissing as error:
            missing.append(f"not by {name}, because {error}")
    if missing:
        _log.warning(
            "The prefix cache copies %s: %s. Install the extra 'gpu' of deepinfer-serve, or update the "
            "driver.",
            "in one way only" if opened else "run by run, which is slow",
            "; ".join(missing),
        )
    return MethodChoice(
        opened.get("batch") or opened.get("kernel") or single,
        opened.get("kernel") or opened.get("batch") or single,
        row_bytes,
    )


def _open_batch(pools: PoolPair, device: torch.device, stream: CudaStream) -> CopyMethod:
    call = find_batch_call()
    check_copy(device, lambda scratch: try_batch_call(call, scratch, stream))
    return BatchCopy(pools, call)


def _open_kernel(pools: PoolPair, device: torch.device, stream: CudaStream) -> CopyMethod:
    on_device = PoolPair(
        pools.device, pools.device_pitch, address_on_device(pools.host), pools.row_bytes
    )
    kernel = CompiledCopyKernel(device)
    copy = KernelCopy(on_device, kernel)
    check_copy(device, lambda scratch: try_copy_kernel(kernel, scratch, stream))
    return copy


def check_copy(device: torch.device, attempt: Callable[[int], None]) -> None:
    """Make a copy within the device before the first page travels, so that a way that this machine's
    packages do not have ends the start, or is left out of `auto`, and not a step under load.

    Args:
        device: the GPU.
        attempt: starts a copy of the 16 bytes at an address to the 16 bytes behind them.

    Raises:
        CopyMethodMissing: it cannot be started, or copies something else.
    """
    scratch = torch.arange(32, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    attempt(scratch.data_ptr())
    torch.cuda.synchronize(device)  # also before the memory is given back
    if scratch.tolist() != 2 * list(range(16)):
        raise CopyMethodMissing("a copy within the GPU brought other bytes than it should")


def record_time(stream: CudaStream | None = None) -> CudaEvent:
    """Record an event that tells when it was passed; None: in the current stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(cast("torch.cuda.Stream | None", stream))
    return cast("CudaEvent", event)


def _as_stream(stream: torch.cuda.Stream) -> CudaStream:
    # It takes torch's own events only; copiers give it no others.
    return cast("CudaStream", stream)
