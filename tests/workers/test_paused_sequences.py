"""Slots and pages belong to sequences that are read: one that is not gives way to all others."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.pool.segment import create_segment
from tests.support.rank import PAGE, VOCAB, Rank
from transport.ids import RequestId
from workers.scheduling.sequence import Sequence, Status
from workers.scheduling.step import StepKind


@dataclass
class Wanted:
    prompt: list[int]
    output: int
    at: int
    priority: int
    unread_at: int | None
    """Turns after its arrival; None: it is always read."""
    unread_for: int | None
    """Turns; None: until all others are over."""


WANTED = st.builds(
    Wanted, st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=60), st.integers(1, 25),
    st.integers(0, 30), st.integers(-1, 1), st.none() | st.integers(0, 12),
    st.none() | st.integers(1, 15),
)  # fmt: skip


def throttle(rank: Rank, number: int, paused: bool) -> None:
    rank.scheduler.throttle(RequestId(f"r{number}"), 0, paused)
    rank.scheduler.check_integrity()


def turn(rank: Rank, sequences: list[Sequence]) -> bool:
    before = {sequence: sequence.slot for sequence in sequences}
    worked = rank.turn()
    paused = [sequence for sequence in sequences if sequence.paused]
    assert all(s.slot is None for s in paused if before[s] is None), "it is let in unread"
    lost = [
        s for s in sequences
        if not s.paused and before[s] is not None and s.slot is None and s.status is Status.WAITING
    ]  # fmt: skip
    if lost:
        assert all(s.slot is None for s in paused), "one that is read gave way to one that is not"
    return worked


@settings(max_examples=120, deadline=None)
@given(
    traffic=st.lists(WANTED, min_size=1, max_size=10),
    num_pages=st.integers(12, 26),
    slots=st.integers(1, 5),
    budget=st.integers(3, 40),
    depth=st.integers(0, 1),
    window=st.sampled_from([(0, 0), (5, 11)]),
)
def test_those_that_are_read_get_on_and_the_others_get_all_once_they_are_read(
    traffic, num_pages, slots, budget, depth, window
):
    with contextlib.ExitStack() as stack:
        fd = create_segment("test")
        stack.callback(os.close, fd)
        rank = Rank(
            fd,
            *window,
            num_pages=num_pages,
            max_num_seqs=slots,
            budget=budget,
            depth=depth,
            delay=1,
        )
        sequences: list[Sequence] = []
        numbers: list[int] = []
        for now in range(3000):
            for number, wanted in enumerate(traffic):
                start = None if wanted.unread_at is None else wanted.at + wanted.unread_at
                if wanted.at == now:
                    new = rank.add(number, wanted.prompt, wanted.output, priority=wanted.priority)
                    sequences.append(new)
                    numbers.append(number)
                if start == now:
                    throttle(rank, number, True)
                if start is not None and wanted.unread_for and now == start + wanted.unread_for:
                    throttle(rank, number, False)
            if not turn(rank, sequences) and now > 60:
                break
        else:
            raise AssertionError("it never came to rest")
        for sequence, number in zip(sequences, numbers, strict=True):
            assert sequence.status is Status.FINISHED or sequence.paused, "it waits for the unread"
            throttle(rank, number, False)
        rank.run()
        for number, wanted in enumerate(traffic):
            assert rank.tokens_of(number) == rank.simulate(wanted.prompt, wanted.output)
        rank.check_rest()
        rank.close()


UNREAD = range(4)


@pytest.mark.parametrize(
    ("slots", "num_pages"), [(4, 60), (8, 4 * 6)], ids=["slots", "pages"]
)  # fmt: skip
@pytest.mark.parametrize("priority", [-5, 0])
def test_unread_streams_keep_nobody_waiting(make_rank, slots, num_pages, priority):
    rank = make_rank(num_pages=num_pages, max_num_seqs=slots, budget=200)
    for number in UNREAD:
        rank.add(number, [number] * (5 * PAGE), 30, priority=priority)
    while not all(rank.tokens_of(number) for number in UNREAD):
        rank.turn()
    for number in UNREAD:
        throttle(rank, number, True)
    rank.add(9, [9] * (5 * PAGE), 2)
    for _ in range(3):  # its prompt, its tokens; nothing else comes before
        rank.turn()
    assert rank.tokens_of(9) == rank.simulate([9] * (5 * PAGE), 2)
    assert rank.scheduler.counts.preemptions == 1, "more have lost their slot than had to"
    for number in UNREAD:
        throttle(rank, number, False)
    rank.run()
    for number in UNREAD:
        assert rank.tokens_of(number) == rank.simulate([number] * (5 * PAGE), 30)


def test_one_that_nobody_displaces_goes_on_where_it_was(make_rank):
    rank = make_rank()
    for number in range(2):
        rank.add(number, [number] * 9, 20)
    rank.turn()
    throttle(rank, 0, True)
    for _ in range(10):
        rank.turn()
    assert (len(rank.tokens_of(0)), len(rank.tokens_of(1))) == (1, 11)
    throttle(rank, 0, False)
    rank.run()
    assert rank.tokens_of(0) == rank.simulate([0] * 9, 20)
    assert rank.scheduler.counts.preemptions == 0
    assert rank.scheduler.counts.prompt_tokens == 2 * 9


def test_one_that_is_displaced_is_computed_again_only_when_it_is_read(make_rank):
    rank = make_rank(max_num_seqs=1)
    rank.add(0, [1] * 9, 20, prefix_cache=False)
    rank.turn()
    throttle(rank, 0, True)
    rank.add(1, [2] * 9, 3, prefix_cache=False)
    rank.run()
    assert rank.tokens_of(1) == rank.simulate([2] * 9, 3)
    assert len(rank.tokens_of(0)) == 1
    assert rank.scheduler.next_kind() is StepKind.IDLE
    assert rank.scheduler.counts.prompt_tokens == 2 * 9
    throttle(rank, 0, False)
    rank.run()
    assert rank.tokens_of(0) == rank.simulate([1] * 9, 20)
