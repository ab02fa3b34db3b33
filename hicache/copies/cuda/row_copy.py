"""Copies between a GPU's rows here and page-locked rows there, beside the engine's steps and in order
with them.

There is a stream for each direction, because the batched driver call does not take the default stream,
on which engines run, and because stores should run beside the steps that follow them.

- A load waits for the engine's stream (a step under way may still write to the page's former owner),
  and the engine's stream waits for the load.
- A store waits for the engine's stream, so that it reads what the steps before it wrote. Nobody waits
  for the store but who would overwrite its rows: before each step the engine names the rows that it is
  about to write (`before_overwrite`), a load does so by itself. Freed pages soon go to other sequences;
  most steps of a decode write to none of them, and run on.

Rows there need no such care: whoever owns them keeps them until `done`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from hicache.copies.cuda.method import CopyMethod, CudaEvent, CudaStream
from hicache.copies.row_copy import Direction, Done, PendingCopy
from hicache.copies.runs import IndexArray, RowRuns, merge_runs
from hicache.errors import HostPoolError

BATCH_FROM_BYTES: Final[Mapping[Direction, int]] = {"load": 512 << 10, "store": 16 << 10}
"""Mean length of runs from which the batched call is used by `auto`; see `doc/page_copy.md`.

The batched call takes about a microsecond a run on the host before the bytes, and the kernel moves 5 to
10 % fewer bytes a second whatever the runs: they are even at some 0.5 MB. While a load runs the engine
waits, so the faster one is right. Nobody waits for a store, but the kernel slows the steps beside it
many times as much: so stores use the batched call for all runs but tiny ones."""


@dataclass(frozen=True)
class TimedCopy:
    """Lies between two timed events of a stream, of which the first one comes behind all waiting."""

    begun: CudaEvent
    over: CudaEvent

    def done(self) -> bool:
        return self.over.query()

    def seconds(self) -> float:
        return self.begun.elapsed_time(self.over) / 1e3


@dataclass(frozen=True)
class CopyStreams:
    """The streams of one copier."""

    load: CudaStream
    store: CudaStream
    engine: Callable[[], CudaStream]
    """The stream on which the next step will run."""
    record_time: Callable[[CudaStream], CudaEvent]
    """Record an event in a stream that tells when it was passed."""


@dataclass(frozen=True)
class MethodChoice:
    """Which method makes a copy: `long_runs` where its runs are long on average."""

    long_runs: CopyMethod
    short_runs: CopyMethod
    row_bytes: int

    def pick(self, direction: Direction, runs: RowRuns) -> CopyMethod:
        mean_bytes = float(runs.length.mean()) * self.row_bytes
        return self.long_runs if mean_bytes >= BATCH_FROM_BYTES[direction] else self.short_runs


class _Store(NamedTuple):
    """A store that may be under way."""

    rows: IndexArray
    over: CudaEvent


class GpuRowCopier:
    """`RowCopier` by two streams of its own. Made by `hicache.copies.cuda.open.open_gpu_row_copier`."""

    def __init__(self, methods: MethodChoice, streams: CopyStreams) -> None:
        self._methods = methods
        self._streams = streams
        self._stores: deque[_Store] = deque()

    def load(self, here: IndexArray, there: IndexArray) -> PendingCopy:
        if not len(here):
            return Done()
        streams, engine = self._streams, self._streams.engine()
        self.before_overwrite(here)
        streams.load.wait_event(engine.record_event())
        copy = self._start("load", here, there, streams.load)
        engine.wait_event(copy.over)
        return copy

    def store(self, here: IndexArray, there: IndexArray) -> PendingCopy:
        if not len(here):
            return Done()
        streams = self._streams
        streams.store.wait_event(streams.engine().record_event())
        copy = self._start("store", here, there, streams.store)
        self._stores.append(_Store(here.copy(), copy.over))
        return copy

    def before_overwrite(self, here: IndexArray) -> None:
        while self._stores and self._stores[0].over.query():
            self._stores.popleft()
        engine = self._streams.engine()
        # They are over in the order in which they began: waiting for the last one concerned is enough.
        for store in reversed(self._stores):
            if np.isin(here, store.rows).any():
                engine.wait_event(store.over)
                return

    def _start(
        self, direction: Direction, here: IndexArray, there: IndexArray, stream: CudaStream
    ) -> TimedCopy:
        runs = merge_runs(here, there)
        begun = self._streams.record_time(stream)
        try:
            self._methods.pick(direction, runs).start(direction, runs, stream)
        except HostPoolError:
            stream.synchronize()  # some of the runs may be under way, and their rows go to others now
            raise
        return TimedCopy(begun, self._streams.record_time(stream))
