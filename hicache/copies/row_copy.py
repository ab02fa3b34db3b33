"""Copies of rows between a device pool and the host pool.

A device row may be longer than its host row: of a state, only the first part is kept. The calls
return at once where the device works on its own; a copy is over when its `PendingCopy` says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from hicache.copies.runs import IndexArray, merge_runs
from hicache.pool.host_pool import RowArray


class PendingCopy(Protocol):
    """A copy that was started."""

    def done(self) -> bool:
        """Whether all its bytes have arrived. Never blocks."""
        ...

    def seconds(self) -> float:
        """How long its bytes travelled, without what it waited for before. Asked when it is `done`."""
        ...


class RowCopier(Protocol):
    """Copies between the rows of one device pool and one host pool."""

    def upload(self, device_rows: IndexArray, host_rows: IndexArray) -> PendingCopy:
        """Copy host row `host_rows[i]` into device row `device_rows[i]`, for all i.

        What the device runs later reads the new rows. Host rows must stay as they are until `done`.

        Raises:
            HostPoolError: the device refuses.
        """
        ...

    def download(self, device_rows: IndexArray, host_rows: IndexArray) -> PendingCopy:
        """Copy device row `device_rows[i]` into host row `host_rows[i]`, for all i.

        It reads what the device wrote before the call. `before_overwrite` keeps it apart from what
        the device runs later.

        Raises:
            HostPoolError: the device refuses; no byte is under way.
        """
        ...

    def before_overwrite(self, device_rows: IndexArray) -> None:
        """What the device runs from now on may overwrite these rows: it waits for their downloads."""
        ...


@dataclass(frozen=True)
class Done:
    """A copy that was over when the call that started it returned."""

    taken: float = 0.0
    """Seconds."""

    def done(self) -> bool:
        return True

    def seconds(self) -> float:
        return self.taken


def copy_now(copy: Callable[[], None]) -> Done:
    """Make a copy that is over when `copy` returns."""
    started = time.perf_counter()
    copy()
    return Done(time.perf_counter() - started)


class CpuRowCopier:
    """Both pools are host memory; a copy is over when its call returns."""

    def __init__(self, device_rows: RowArray, host_rows: RowArray) -> None:
        """Args:
        device_rows: uint8, shape [rows, at least the host row's bytes].
        host_rows: uint8, shape [slots, bytes].
        """
        self._host = host_rows
        self._device = device_rows[:, : host_rows.shape[1]]

    def upload(self, device_rows: IndexArray, host_rows: IndexArray) -> PendingCopy:
        def copy() -> None:
            for device, host, length in zip(*merge_runs(device_rows, host_rows), strict=True):
                self._device[device : device + length] = self._host[host : host + length]

        return copy_now(copy)

    def download(self, device_rows: IndexArray, host_rows: IndexArray) -> PendingCopy:
        def copy() -> None:
            for device, host, length in zip(*merge_runs(device_rows, host_rows), strict=True):
                self._host[host : host + length] = self._device[device : device + length]

        return copy_now(copy)

    def before_overwrite(self, device_rows: IndexArray) -> None: ...
