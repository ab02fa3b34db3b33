"""Copies and steps on simulated CUDA streams: whatever the order in which the device gets to its streams,
copies read and write what they should. The device's work is done by address, as the driver does it."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.copies.cuda.batch import BatchCopy
from hicache.copies.cuda.method import RowPair
from hicache.copies.cuda.row_copy import BATCH_FROM_BYTES, CopyStreams, GpuRowCopier, MethodChoice
from hicache.copies.rows import HostRows
from hicache.copies.runs import RowRuns
from hicache.errors import HostPoolError

ROWS = 8
ROW_BYTES = 32


@dataclass
class Event:
    passed: bool = False
    time: float = 0.0
    """Milliseconds."""

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, later: Event) -> float:
        assert self.passed and later.passed, "asked before it was over"
        return later.time - self.time


@dataclass
class Clock:
    """Every copied run and every step takes its time."""

    now: float = 0.0


@dataclass
class Stream:
    """Work in the order in which it was given; nothing happens before `step`."""

    cuda_stream: int
    clock: Clock
    synchronize: Callable[[], None]
    work: deque[Callable[[], bool]] = field(default_factory=deque)

    def record_event(self) -> Event:
        event = Event()

        def passes() -> bool:
            event.passed = True
            event.time = self.clock.now
            return True

        self.work.append(passes)
        return event

    def wait_event(self, event: Event) -> None:
        self.work.append(event.query)

    def give(self, action: Callable[[], None], takes: float = 1.0) -> None:
        def act() -> bool:
            action()
            self.clock.now += takes
            return True

        self.work.append(act)

    def step(self) -> bool:
        """Do one piece of work, if the stream does not wait."""
        if self.work and self.work[0]():
            self.work.popleft()
            return True
        return False


class Machine:
    """A GPU with two pools, an engine's stream and a copier."""

    def __init__(self) -> None:
        self.host = np.zeros((ROWS, ROW_BYTES), np.uint8)
        self.device = np.zeros((ROWS, ROW_BYTES), np.uint8)
        clock = Clock()
        self.streams = [Stream(number, clock, self.finish) for number in (0, 7, 8)]
        self.refused_after = ROWS + 1
        self.engine, load, store = self.streams
        rows = RowPair(HostRows.of(self.device), HostRows.of(self.host))
        method = BatchCopy(rows, self.batch_call)
        self.copier = GpuRowCopier(
            MethodChoice(method, method, ROW_BYTES),
            CopyStreams(load, store, lambda: self.engine, lambda stream: stream.record_event()),
        )

    def batch_call(self, targets, sources, sizes, handle) -> str:
        assert handle != 0, "the batched call does not take the default stream"
        assert len(targets) == len(sources) == len(sizes) > 0
        stream = next(s for s in self.streams if s.cuda_stream == handle)
        for target, source, size in list(zip(targets, sources, sizes, strict=True))[
            : self.refused_after
        ]:
            stream.give(lambda t=target, s=source, n=size: ctypes.memmove(t, s, n))
        return "" if len(targets) <= self.refused_after else "cudaErrorUnknown"

    def run(self, draws: list[int]) -> None:
        """Let the streams go on in the drawn order, one piece of work at a time."""
        for draw in draws:
            self.streams[draw].step()

    def finish(self) -> None:
        while any(stream.step() for stream in self.streams):
            pass
        assert not any(stream.work for stream in self.streams), "the streams wait for each other"


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["step", "load", "store"]),
        st.permutations(range(ROWS)),
        st.integers(0, 4),
        st.lists(st.integers(0, 2), max_size=12),
    ),
    min_size=1,
    max_size=14,
)


@given(ACTIONS, st.randoms(use_true_random=False))
def test_any_progress_of_the_streams_gives_what_doing_one_after_the_other_gives(actions, random):
    machine = Machine()
    host, device = machine.host.copy(), machine.device.copy()
    fresh_host_rows, stored_rows = iter(range(ROWS)), []
    for value, (action, rows, count, draws) in enumerate(actions, 1):
        pages = np.array(rows[:count], np.int32)
        match action:
            case "step":
                machine.copier.before_overwrite(pages)
                # It reads all rows and writes its own, as a prompt step does.
                result = (device.sum() + value) % 251
                device[pages] = result

                def step(pages=pages, value=value):
                    machine.device[pages] = (machine.device.sum() + value) % 251

                machine.engine.give(step)
            case "store":
                # The cache gives a host row out once, until it knows that it is whole.
                slots = [slot for slot, _ in zip(fresh_host_rows, range(count), strict=False)]
                pages = pages[: len(slots)]
                copy = machine.copier.store(pages, np.array(slots, np.int32))
                host[slots] = device[pages]
                stored_rows.append((copy, slots))
            case "load":
                whole = [slot for copy, slots in stored_rows if copy.done() for slot in slots]
                pages = pages[: len(whole)]
                slots = np.array(random.sample(whole, len(pages)), np.int32)
                machine.copier.load(pages, slots)
                device[pages] = host[slots]
        machine.run(draws)
    machine.finish()
    np.testing.assert_array_equal(machine.device, device)
    np.testing.assert_array_equal(machine.host, host)
    assert all(copy.done() for copy, _ in stored_rows)


def test_a_step_that_writes_elsewhere_does_not_wait_for_a_store():
    machine = Machine()
    copy = machine.copier.store(np.array([1, 2], np.int32), np.array([0, 1], np.int32))
    machine.copier.before_overwrite(np.array([3], np.int32))
    machine.run([0] * 5)
    assert not machine.engine.work
    assert not copy.done()
    machine.copier.before_overwrite(np.array([2], np.int32))
    machine.run([0] * 5)
    assert machine.engine.work
    machine.finish()
    assert copy.done()
    machine.copier.before_overwrite(np.array([2], np.int32))
    assert not machine.engine.work, "a store that is over is forgotten"


def test_a_load_does_not_overwrite_what_is_being_stored():
    machine = Machine()
    machine.device[1], machine.host[3] = 7, 9
    machine.copier.store(np.array([1], np.int32), np.array([0], np.int32))
    machine.copier.load(np.array([1], np.int32), np.array([3], np.int32))
    machine.run([0] * 5 + [1] * 5)  # the loads get as far as they may before any store
    machine.finish()
    assert (machine.host[0] == 7).all()
    assert (machine.device[1] == 9).all()


@pytest.mark.parametrize("direction", ["load", "store"])
def test_the_time_of_a_copy_is_not_that_of_the_step_before_it(direction):
    machine = Machine()
    machine.engine.give(lambda: None, takes=5000.0)
    copier = machine.copier
    start = copier.load if direction == "load" else copier.store
    copy = start(np.array([1, 3], np.int32), np.array([0, 5], np.int32))
    machine.engine.give(lambda: None, takes=700.0)
    machine.finish()
    assert copy.seconds() == 2 * 1.0 / 1000, "two runs of a millisecond each"


@pytest.mark.parametrize("direction", ["load", "store"])
def test_of_a_copy_that_was_refused_nothing_is_under_way(direction):
    """Its rows go to others as soon as the call has raised."""
    machine = Machine()
    machine.refused_after = 2
    start = machine.copier.load if direction == "load" else machine.copier.store
    with pytest.raises(HostPoolError, match="cudaErrorUnknown"):
        start(np.array([1, 3, 5], np.int32), np.array([0, 5, 7], np.int32))
    assert not any(stream.work for stream in machine.streams)


class Named:
    def __init__(self) -> None:
        self.runs: list[RowRuns] = []

    def start(self, direction, runs, stream) -> None:
        self.runs.append(runs)


@pytest.mark.parametrize("direction", ["load", "store"])
def test_the_mean_length_of_the_runs_decides(direction):
    """Not the longest, and not the number of rows: short runs cost as much to begin as long ones."""
    limit = BATCH_FROM_BYTES[direction]
    row_bytes = limit // 4
    long_runs, short_runs = Named(), Named()
    methods = MethodChoice(long_runs, short_runs, row_bytes)

    def runs(*lengths: int) -> RowRuns:
        starts = np.arange(len(lengths), dtype=np.int64) * 100
        return RowRuns(starts, starts, np.array(lengths, np.int64))

    assert methods.pick(direction, runs(4)) is long_runs
    assert methods.pick(direction, runs(3)) is short_runs
    assert methods.pick(direction, runs(7, 1)) is long_runs
    assert methods.pick(direction, runs(8, 1, 1)) is short_runs


def test_nothing_to_copy_is_over_at_once():
    machine = Machine()
    none = np.empty(0, np.int32)
    assert machine.copier.load(none, none).done()
    assert machine.copier.store(none, none).done()
    assert not any(stream.work for stream in machine.streams)
