"""Copies between a GPU's rows and a page-locked host pool, one driver call a run, on one stream."""

from __future__ import annotations

import torch

from hicache.errors import HostPoolError
from hicache.host_pool import HostPool, RowArray
from hicache.row_copy import PendingCopy
from hicache.runs import IndexArray, merge_runs

_PORTABLE = 1  # cudaHostRegisterPortable


class PinnedPool:
    """A host pool's memory, page-locked for as long as this object is open."""

    def __init__(self, pool: HostPool) -> None:
        """
        Raises:
            HostPoolError: the driver refuses, for example for want of lockable memory.
        """
        self._address = int(pool.memory.ctypes.data)
        self._driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = self._driver.cudaHostRegister(self._address, pool.memory.nbytes, _PORTABLE)
        if int(status) != 0:
            raise HostPoolError(
                f"The host prefix cache cannot be page-locked for the GPU (CUDA error {int(status)}): "
                "raise the limit on locked memory (ulimit -l), or lower --hicache-size-gb."
            )

    def close(self) -> None:
        """Give the pages back to the operating system's care."""
        self._driver.cudaHostUnregister(self._address)


class CudaRowCopier:
    """See `RowCopier`. Copies run on the stream that is current when they are started, so that they
    are ordered with the engine's steps."""

    def __init__(self, device_rows: torch.Tensor, host_rows: RowArray) -> None:
        """Args:
        device_rows: uint8, shape [rows, at least the host row's bytes], on the GPU.
        host_rows: uint8, shape [slots, bytes], page-locked.
        """
        self._host = torch.from_numpy(host_rows)
        self._device = device_rows[:, : host_rows.shape[1]]

    def upload(self, device_rows: IndexArray, host_rows: IndexArray) -> PendingCopy:
        """See `RowCopier`."""
        for device, host, length in zip(*merge_runs(device_rows, host_rows), strict=True):
            self._device[device : device + length].copy_(
                self._host[host : host + length], non_blocking=True
            )
        return StreamMark()

    def download(self, device_rows: IndexArray, host_rows: IndexArray) -> PendingCopy:
        """See `RowCopier`."""
        for device, host, length in zip(*merge_runs(device_rows, host_rows), strict=True):
            self._host[host : host + length].copy_(
                self._device[device : device + length], non_blocking=True
            )
        return StreamMark()


class StreamMark:
    """Done when everything on the current stream, as of now, is."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def done(self) -> bool:
        """See `PendingCopy`."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]
