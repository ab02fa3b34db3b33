"""Prompts that are being computed, and who waits for them because it begins alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hicache.cache.prefix_cache import PrefixCache
from hicache.keys import PromptKeys
from hicache.manager.ticket import Announcement, PrefixTicket, PrefixWait


class Prefills:
    """What is announced, by the keys of the positions where hits will be possible.

    A sequence that waits is looked at before every prompt step, so that look is O(1): what it waits for
    is sought again only when that is over.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._open: set[Announcement] = set()
        self._by_key: dict[bytes, list[Announcement]] = {}

    def open(
        self, leader: PrefixTicket, prompt: PromptKeys, anchors: Sequence[int] | None = None
    ) -> Announcement:
        """Announce that `leader` computes this prompt, which will be stored with these anchors.

        Whoever opens it closes it: when it is stored, or when it will not be.
        """
        keys = self._cache.stores.resume_keys(prompt, anchors)
        announcement = Announcement(tuple(keys), prompt.num_tokens, leader)
        self._open.add(announcement)
        for key in announcement.keys:
            self._by_key.setdefault(key, []).append(announcement)
        return announcement

    def close(self, announcement: Announcement) -> None:
        if announcement not in self._open:
            return
        self._open.remove(announcement)
        for key in announcement.keys:
            others = self._by_key[key]
            others.remove(announcement)
            if not others:
                del self._by_key[key]

    def is_open(self, announcement: Announcement) -> bool:
        return announcement in self._open

    def announced(self, prompt: PromptKeys) -> Iterator[tuple[int, Announcement]]:
        """Hits that will be possible: their tokens and who announced them, longest first."""
        keys = self._cache.hit_keys(prompt)
        for pages in range(len(keys), 0, -1):
            for announcement in self._by_key.get(keys[pages - 1], ()):
                yield pages * self._cache.page_tokens, announcement

    def should_wait(self, ticket: PrefixTicket) -> bool:
        """Whether somebody has less left to compute of a longer prefix than `ticket` saves by it."""
        wait = ticket.wait
        if wait is None or not self._is_worth(wait):
            ticket.wait = None if ticket.hit_keys is None else self._find(ticket.hit_keys)
        elif _has_stalled(wait):
            # Better ones take all the room in the steps: whoever waited for it would come as late.
            ticket.wait = None
        return ticket.wait is not None

    def _find(self, prompt: PromptKeys) -> PrefixWait | None:
        has_now = -1
        tried: set[Announcement] = set()
        for num_tokens, announcement in self.announced(prompt):
            if has_now < 0:
                has_now = self._cache.findable_tokens(prompt)
            if num_tokens <= has_now:
                break
            if announcement in tried:  # with more to save
                continue
            tried.add(announcement)
            leader = announcement.leader
            seen = 0 if leader is None else leader.num_computed
            wait = PrefixWait(announcement, num_tokens - has_now, seen)
            if self._is_worth(wait):
                return wait
        return None

    def _is_worth(self, wait: PrefixWait) -> bool:
        announcement = wait.announcement
        if announcement not in self._open:
            return False
        leader = announcement.leader
        return leader is None or announcement.end - leader.num_computed <= wait.gain

    def check_integrity(self, tickets: Iterable[PrefixTicket]) -> None:
        own = {a for t in tickets for a in (t.announcement, t.cut_announcement) if a}
        if own != {announcement for announcement in self._open if announcement.leader is not None}:
            raise AssertionError("the announced prompts are not those that are being computed")
        listed = [(key, id(a)) for key, all_of in self._by_key.items() for a in all_of]
        if sorted(listed) != sorted((key, id(a)) for a in self._open for key in a.keys):
            raise AssertionError("the announced keys are not those of the open announcements")


def _has_stalled(wait: PrefixWait) -> bool:
    leader = wait.announcement.leader
    if leader is None:
        return False
    before, wait.seen = wait.seen, leader.num_computed
    return wait.seen == before
