"""Sequences in `Sequence.order`."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from operator import attrgetter

from workers.scheduling.sequence import Sequence

_order = attrgetter("order")


class SequenceQueue:
    """Finds a sequence by bisection, so adding and removing stay cheap however long the queue is.

    A sequence's sort key must not change while the sequence is queued.
    """

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """The queue may change during iteration: next comes whatever then follows the last one."""
        at = 0
        while at < len(self._sequences):
            sequence = self._sequences[at]
            yield sequence
            at += 1
            if at > len(self._sequences) or self._sequences[at - 1] is not sequence:
                at = bisect_right(self._sequences, sequence.order, key=_order)

    def __reversed__(self) -> Iterator[Sequence]:
        """The queue must not change during iteration."""
        return reversed(self._sequences)

    @property
    def first(self) -> Sequence | None:
        return self._sequences[0] if self._sequences else None

    def add(self, sequence: Sequence) -> None:
        self._sequences.insert(self._place(sequence), sequence)

    def remove(self, sequence: Sequence) -> bool:
        at = self._place(sequence)
        if at == len(self._sequences) or self._sequences[at] is not sequence:
            return False
        del self._sequences[at]
        return True

    def _place(self, sequence: Sequence) -> int:
        return bisect_left(self._sequences, sequence.order, key=_order)
