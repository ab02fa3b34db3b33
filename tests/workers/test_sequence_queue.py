"""Queues of sequences, and that leaving them does not look at all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.ids import ProcessName, RequestId
from transport.messages.generate import Generate, SamplingParams
from workers.engine.fake import FakeEngine, FakeEngineSettings
from workers.scheduling.scheduler import Scheduler
from workers.scheduling.sequence import Sequence
from workers.scheduling.sequence_queue import SequenceQueue


def make_sequence(
    request: str, index: int = 0, arrival: float = 0.0, priority: int = 0
) -> Sequence:
    return Sequence(
        key=(RequestId(request), index), frontend=ProcessName("frontend/0"),
        prompt=np.ones(3, np.int32), prompt_len=3,
        generate=Generate(SamplingParams(max_tokens=5), priority=priority), seed=0, arrival=arrival,
    )  # fmt: skip


PLACES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=12)


@given(PLACES, st.lists(st.integers(0, 11)))
def test_a_queue_is_in_order_and_knows_who_is_in_it(places, removed):
    sequences = [
        make_sequence(f"r{n}", arrival=arrival, priority=priority)
        for n, (priority, arrival) in enumerate(places)
    ]
    queue = SequenceQueue()
    for sequence in sequences:
        queue.add(sequence)
    inside = set(range(len(sequences)))
    for number in removed:
        if number < len(sequences):
            assert queue.remove(sequences[number]) == (number in inside)
            inside.discard(number)
    expected = sorted((sequences[n] for n in inside), key=lambda s: s.order)
    assert list(queue) == expected
    assert list(reversed(queue)) == expected[::-1]
    assert len(queue) == len(expected)
    assert queue.first is (expected[0] if expected else None)


@given(st.integers(1, 10), st.data())
def test_each_one_is_met_once_while_the_queue_changes(count, data):
    queue = SequenceQueue()
    sequences = [make_sequence(f"r{n}", arrival=float(n)) for n in range(count)]
    for sequence in sequences:
        queue.add(sequence)
    met: list[Sequence] = []
    inside = set(range(count))
    for sequence in queue:
        met.append(sequence)
        assert sequences.index(sequence) in inside
        for number in data.draw(st.sets(st.integers(0, count - 1), max_size=3)):
            if queue.remove(sequences[number]):
                inside.remove(number)
            else:
                queue.add(sequences[number])
                inside.add(number)
    numbers = [sequences.index(sequence) for sequence in met]
    assert numbers == sorted(set(numbers))
    assert inside - set(numbers) <= set(range(max(numbers)))  # else they had come too late


CANCEL: dict[str, Callable[[Scheduler, RequestId], object]] = {
    "the request": lambda scheduler, request: scheduler.cancel(request),
    "one choice": lambda scheduler, request: scheduler.cancel(request, 2),
}


@pytest.fixture
def comparisons(monkeypatch) -> Iterator[list[None]]:
    """Grows with every look at a sequence's place, request or identity."""
    seen: list[None] = []
    order = Sequence.order.fget
    assert order is not None

    def counted_order(sequence: Sequence) -> object:
        seen.append(None)
        return order(sequence)

    def counted_equality(sequence: Sequence, other: object) -> bool:
        seen.append(None)
        return sequence is other

    monkeypatch.setattr(Sequence, "order", property(counted_order))
    monkeypatch.setattr(Sequence, "__eq__", counted_equality)
    return seen


@pytest.mark.parametrize("what", CANCEL)
@pytest.mark.parametrize("started", [False, True])
def test_cancelling_looks_at_no_more_sequences_however_many_are_queued(comparisons, what, started):
    class CountedId(str):
        def __eq__(self, other: object) -> bool:
            comparisons.append(None)
            return str(self) == str(other)

        __hash__ = str.__hash__

    looks = []
    for others in (30, 3000):
        engine = FakeEngine(FakeEngineSettings(23, 12, 6, 96, page_tokens=8))
        scheduler = Scheduler(engine.info, 64, 1)
        for number in range(others):
            scheduler.add(make_sequence(CountedId(f"r{number}"), arrival=float(number)))
        cancelled = CountedId("cancelled")
        for index in range(4):
            place = -1.0 if started else others / 2
            scheduler.add(make_sequence(cancelled, index, arrival=place))
        step = scheduler.next_step()
        assert step is not None
        comparisons.clear()
        assert CANCEL[what](scheduler, RequestId(cancelled))
        looks.append(len(comparisons))
        scheduler.check_integrity()
    few, many = looks
    # A bisection of a hundred times as many takes seven looks more; three queues at most, four choices.
    assert many <= few + 4 * 3 * 7
