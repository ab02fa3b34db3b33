"""Who waits for whose prompt: sequences that begin like one that is being computed now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.scheduling.sequence import PrefixWait, Sequence

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache.cache.outcomes import Announcement
    from hicache.cache.prefix_cache import PrefixCache
    from hicache.keys import PromptKeys


class PrefixWaits:
    """Announces prompts to the cache and tells whether waiting for one is worth it.

    A sequence that waits is looked at before every prompt step, so that look is O(1): what it waits for
    is sought again only when that is over.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._leaders: dict[int, Sequence] = {}
        """Who computes, by serial of the announcement."""

    def open(
        self, sequence: Sequence, prompt: PromptKeys, anchors: tuple[int, ...] | None = None
    ) -> Announcement:
        """Announce what the sequence computes (see `PrefixCache.announce`)."""
        announcement = self._cache.announce(prompt, anchors)
        self._leaders[announcement.serial] = sequence
        return announcement

    def hand_over(self, announcement: Announcement) -> None:
        """It is computed. Whoever stores it withdraws the announcement from the cache."""
        del self._leaders[announcement.serial]

    def close(self, announcement: Announcement) -> None:
        """It will not be computed, or not be stored."""
        self.hand_over(announcement)
        self._cache.withdraw(announcement)

    def should_wait(self, sequence: Sequence, prompt: PromptKeys) -> bool:
        """Whether somebody has less left to compute of a longer prefix than `sequence` saves by it.
        `prompt` are the keys of what it can hit."""
        wait = sequence.wait
        if wait is None or not self._is_worth(wait):
            sequence.wait = self._find(prompt)
        elif self._has_stalled(wait):
            # Better ones take all the room in the steps: whoever waited for it would rank as it does.
            sequence.wait = None
        return sequence.wait is not None

    def check_integrity(self, live: Iterable[Sequence]) -> None:
        """Compare with the sequences that there are.

        Raises:
            AssertionError: an announcement is kept of a sequence that is over, or is lost.
        """
        own = {a for s in live for a in (s.announcement, s.checkpoint_announcement) if a}
        if {a.serial for a in own} != self._leaders.keys():
            raise AssertionError("the announced prompts are not those that are being computed")
        if not all(self._cache.is_announced(announcement) for announcement in own):
            raise AssertionError("a prompt that is being computed is announced no more")

    def _find(self, prompt: PromptKeys) -> PrefixWait | None:
        has_now = -1
        tried: set[int] = set()
        for num_tokens, announcement in self._cache.announced(prompt):
            if has_now < 0:
                has_now = self._cache.findable_tokens(prompt)
            if num_tokens <= has_now:
                break
            if announcement.serial in tried:  # with more to save
                continue
            tried.add(announcement.serial)
            leader = self._leaders.get(announcement.serial)
            seen = 0 if leader is None else leader.num_computed
            wait = PrefixWait(announcement, num_tokens - has_now, seen)
            if self._is_worth(wait):
                return wait
        return None

    def _is_worth(self, wait: PrefixWait) -> bool:
        if not self._cache.is_announced(wait.announcement):
            return False
        leader = self._leaders.get(wait.announcement.serial)
        if leader is None:
            return True  # it is computed and on its way into the cache
        is_part = wait.announcement is leader.checkpoint_announcement
        end = leader.checkpoint if is_part else leader.num_tokens
        return end - leader.num_computed <= wait.gain

    def _has_stalled(self, wait: PrefixWait) -> bool:
        """Whether no chunk of what it waits for was planned since it was last asked."""
        leader = self._leaders.get(wait.announcement.serial)
        if leader is None:
            return False
        before, wait.seen = wait.seen, leader.num_computed
        return wait.seen == before
