"""Copies between rows here and rows there: what every copier promises, and the copier within a host's
memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from hicache.copies.rows import HostRows
from hicache.copies.runs import IndexArray, merge_runs

Direction = Literal["load", "store"]
LINK_DIRECTION: Final[Mapping[Direction, Literal["up", "down"]]] = {"load": "up", "store": "down"}
"""What metrics and reports call it: up to the device, down from it."""


class PendingCopy(Protocol):
    """A copy that was started."""

    def done(self) -> bool:
        """Whether all its bytes have arrived. Never blocks."""
        ...

    def seconds(self) -> float:
        """How long its bytes travelled, without what it waited for before. Asked when it is `done`."""
        ...


class RowCopier(Protocol):
    """Copies between `Rows` here and `Rows` there. A call returns at once where a device copies on its
    own; the copy is over when its `PendingCopy` says so."""

    def load(self, here: IndexArray, there: IndexArray) -> PendingCopy:
        """Copy row `there[i]` there into row `here[i]` here, for all i.

        What the device runs later reads the new rows. The rows there must stay as they are until `done`.

        Raises:
            HostPoolError: the device refuses; no byte is under way.
        """
        ...

    def store(self, here: IndexArray, there: IndexArray) -> PendingCopy:
        """Copy row `here[i]` here into row `there[i]` there, for all i.

        It reads what the device wrote before the call. `before_overwrite` keeps it apart from what
        the device runs later.

        Raises:
            HostPoolError: the device refuses; no byte is under way.
        """
        ...

    def before_overwrite(self, here: IndexArray) -> None:
        """What the device runs from now on may overwrite these rows: it waits for their stores."""
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
    started = time.perf_counter()
    copy()
    return Done(time.perf_counter() - started)


class HostRowCopier:
    """Both sides are host memory; a copy is over when its call returns."""

    def __init__(self, here: HostRows, there: HostRows) -> None:
        self._here = here.memory
        self._there = there.memory

    def load(self, here: IndexArray, there: IndexArray) -> PendingCopy:
        def copy() -> None:
            for near, far, length in zip(*merge_runs(here, there), strict=True):
                self._here[near : near + length] = self._there[far : far + length]

        return copy_now(copy)

    def store(self, here: IndexArray, there: IndexArray) -> PendingCopy:
        def copy() -> None:
            for near, far, length in zip(*merge_runs(here, there), strict=True):
                self._there[far : far + length] = self._here[near : near + length]

        return copy_now(copy)

    def before_overwrite(self, here: IndexArray) -> None: ...
