"""Pages and slots of one rank: who holds which, who is let in, and who gives way when they run out."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from workers.scheduling.index_pool import IndexPool
from workers.scheduling.sequence import Sequence, Status
from workers.scheduling.sequence_queue import SequenceQueue


class BlockManager:
    """Hands out pages chunk by chunk, and a slot to each sequence that is admitted.

    When they run out, it preempts the last sequence in order that holds something, provided that sequence
    comes after the one that asks. So the first in order always makes progress: nothing starves and nothing
    deadlocks. Paused sequences come last in order, and so give way first. A reserved sequence is never
    preempted, since somebody else writes its pages.
    """

    def __init__(
        self,
        num_pages: int,
        num_slots: int,
        page_tokens: int,
        preempt: Callable[[Sequence], None],
    ) -> None:
        """`preempt` takes a sequence out of its queue and calls `release` for it."""
        self._pages = IndexPool(num_pages)
        self._slots = IndexPool(num_slots)
        self.page_tokens = page_tokens
        self._preempt = preempt
        self.holders = SequenceQueue()
        """All that have a slot."""

    @property
    def num_pages(self) -> int:
        return self._pages.count

    @property
    def pages_used(self) -> int:
        return self._pages.num_used

    @property
    def slots_used(self) -> int:
        return self._slots.num_used

    @property
    def max_tokens_of_one(self) -> int:
        return self._pages.count * self.page_tokens

    # ---- slots --------------------------------------------------------------------------------

    def can_admit(self, sequence: Sequence, spare: int) -> bool:
        """Whether there is a slot for the sequence and enough pages to make finishing its prompt likely.

        Pages that half-computed prompts before it in order still need count as theirs. Prompts after it would
        give way, so they cannot keep it from starting.

        Args:
            sequence: has no slot yet.
            spare: pages to leave to sequences that decode.
        """
        victim = self._slot_victim(sequence)
        if victim is None and not self._slots.num_free:
            return False
        if self._slots.num_used == (victim is not None):
            return True  # it would be alone
        room = self._pages.num_free
        for other in self.holders:
            if _gives_way(other, sequence):
                room += len(other.pages)
            else:
                room -= self._promised(other)
        return room >= self._pages_for(sequence.num_tokens) + spare

    def admit(self, sequence: Sequence) -> None:
        """Give the sequence a slot, preempting another one if all are taken. `can_admit` must allow it."""
        victim = self._slot_victim(sequence)
        if victim is not None:
            self._preempt(victim)
        self._take_slot(sequence)

    def reserve(self, sequence: Sequence, num_tokens: int, spare: int) -> bool:
        """Give the sequence a slot and pages for `num_tokens`, from what is free and not promised.

        Nobody gives way for a reservation.
        """
        missing = self._pages_for(num_tokens)
        if not self._slots.num_free:
            return False
        if missing + spare > self._pages.num_free - sum(map(self._promised, self.holders)):
            return False
        self._take_slot(sequence)
        sequence.pages += self._pages.take(missing)
        return True

    def _slot_victim(self, sequence: Sequence) -> Sequence | None:
        return None if self._slots.num_free else self._last_after(sequence)

    def _promised(self, holder: Sequence) -> int:
        if holder.status is not Status.WAITING:
            return 0
        return self._pages_for(holder.num_tokens) - len(holder.pages)

    def _take_slot(self, sequence: Sequence) -> None:
        sequence.slot = self._slots.take(1)[0]
        self.holders.add(sequence)

    # ---- pages --------------------------------------------------------------------------------

    def cover(self, sequence: Sequence, stop: int) -> int:
        """Get pages for the positions before `stop`, preempting others if they run out.

        Returns the position up to which there are pages now, at most `stop`.
        """
        missing = self._pages_for(stop) - len(sequence.pages)
        if missing > 0:
            self._take_pages(sequence, missing)
        return min(stop, len(sequence.pages) * self.page_tokens)

    def _take_pages(self, sequence: Sequence, count: int) -> None:
        while count > self._pages.num_free:
            victim = self._last_after(sequence)
            if victim is None:
                break
            self._preempt(victim)
        sequence.pages += self._pages.take(min(count, self._pages.num_free))

    def release(self, sequence: Sequence) -> None:
        """Take back the slot and all pages. Idempotent.

        A step in flight may still write these pages. That is harmless: steps run in the order of their
        launch, so the next owner's step writes later.
        """
        self._pages.give_back(sequence.pages)
        sequence.pages = []
        if sequence.slot is not None:
            self._slots.give_back([sequence.slot])
            sequence.slot = None
            self.holders.remove(sequence)

    def _last_after(self, sequence: Sequence) -> Sequence | None:
        for other in reversed(self.holders):
            if _gives_way(other, sequence):
                return other
        return None

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def check_integrity(self, live: Iterable[Sequence]) -> None:
        """Compare with the live sequences.

        Raises:
            AssertionError: a page or a slot is lost or has two owners, or a sequence holds too few pages.
        """
        sequences = list(live)
        self._pages.check_integrity(page for s in sequences for page in s.pages)
        self._slots.check_integrity(s.slot for s in sequences if s.slot is not None)
        holders = sorted((s for s in sequences if s.slot is not None), key=lambda s: s.order)
        if list(self.holders) != holders:
            raise AssertionError("the holders are not those that have a slot, in order")
        for sequence in sequences:
            if self._pages_for(sequence.num_computed) > len(sequence.pages):
                raise AssertionError(f"{sequence.key} has computed more than its pages hold")


def _gives_way(other: Sequence, sequence: Sequence) -> bool:
    return other.status is not Status.RESERVED and other.order > sequence.order
