"""Copiers for a GPU, made of the ways to copy that this machine has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

import torch

from hicache.copies.cache_copies import CacheCopies, DeviceCache
from hicache.copies.copy_choice import CopyChoice
from hicache.copies.cuda.batch import BatchCopy, find_batch_call, try_batch_call
from hicache.copies.cuda.compile import CompiledCopyKernel, address_on_device
from hicache.copies.cuda.kernel import KernelCopy, try_copy_kernel
from hicache.copies.cuda.method import (
    CopyMethod,
    CopyMethodMissing,
    CudaEvent,
    CudaStream,
    RowPair,
)
from hicache.copies.cuda.page_lock import PageLock
from hicache.copies.cuda.row_copy import CopyStreams, GpuRowCopier, MethodChoice, TimedCopy
from hicache.copies.cuda.rows import GpuRows
from hicache.copies.cuda.single import SingleCopies
from hicache.copies.rows import HostRows, RowArray
from hicache.errors import HostPoolError

_log = logging.getLogger(__name__)


def open_gpu_cache_copies(
    device: DeviceCache, memory: RowArray, pages: HostRows, states: HostRows, choice: CopyChoice
) -> CacheCopies:
    here = device.pages
    assert isinstance(here, GpuRows)
    lock = PageLock(memory)

    def close() -> None:
        torch.cuda.synchronize(here.memory.device)
        lock.close()

    try:
        copier = open_gpu_row_copier(here, pages.page_locked(), choice)
    except HostPoolError:
        lock.close()
        raise
    return CacheCopies(copier, device.states, states.page_locked(), copy_on_stream, close)


def copy_on_stream(copy: Callable[[], None]) -> TimedCopy:
    begun = record_time()
    copy()
    return TimedCopy(begun, record_time())


def open_gpu_row_copier(here: GpuRows, there: HostRows, choice: CopyChoice) -> GpuRowCopier:
    """A copier between a GPU and the host; compiles the kernel if that was never done here.

    Args:
        here: on the current GPU.
        there: page-locked, rows as long as those here.
        choice: the way to copy; `auto` makes do with what there is.

    Raises:
        HostPoolError: the way that is asked for cannot be had.
    """
    if not there.is_page_locked:
        raise ValueError("a GPU copies to and from page-locked memory only")
    device = here.memory.device
    streams = CopyStreams(
        _as_stream(torch.cuda.Stream(device)),  # type: ignore[no-untyped-call]
        _as_stream(torch.cuda.Stream(device)),  # type: ignore[no-untyped-call]
        lambda: _as_stream(torch.cuda.current_stream(device)),
        record_time,
    )
    rows = RowPair(here, there)
    openers: dict[CopyChoice, Callable[[], CopyMethod]] = {
        "batch": lambda: _open_batch(rows, device, streams.load),
        "kernel": lambda: _open_kernel(rows, device, streams.load),
    }
    single = SingleCopies(here, there)
    return GpuRowCopier(choose_methods(choice, openers, single, rows.row_bytes), streams)


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


def _open_batch(rows: RowPair, device: torch.device, stream: CudaStream) -> CopyMethod:
    call = find_batch_call()
    check_copy(device, lambda scratch: try_batch_call(call, scratch, stream))
    return BatchCopy(rows, call)


def _open_kernel(rows: RowPair, device: torch.device, stream: CudaStream) -> CopyMethod:
    there = replace(rows.there, address=address_on_device(rows.there.address))
    kernel = CompiledCopyKernel(device)
    copy = KernelCopy(RowPair(rows.here, there), kernel)
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
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(cast("torch.cuda.Stream | None", stream))
    return cast("CudaEvent", event)


def _as_stream(stream: torch.cuda.Stream) -> CudaStream:
    # It takes torch's own events only; copiers give it no others.
    return cast("CudaStream", stream)
