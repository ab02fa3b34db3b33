"""Prompts whose prefill is under way, so that others with the same beginning can wait for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

from hicache.cache.outcomes import Announcement


class Announcements:
    """What is announced, by the keys of the positions where hits will be possible."""

    def __init__(self) -> None:
        self._open: dict[int, Announcement] = {}
        self._by_key: dict[bytes, list[Announcement]] = {}
        self._serials = count()

    def open(self, keys: Sequence[bytes]) -> Announcement:
        """Announce prefixes by the key of their last page; no key comes twice."""
        announcement = Announcement(tuple(keys), next(self._serials))
        self._open[announcement.serial] = announcement
        for key in announcement.keys:
            self._by_key.setdefault(key, []).append(announcement)
        return announcement

    def close(self, announcement: Announcement) -> None:
        """Withdraw. Idempotent."""
        if self._open.pop(announcement.serial, None) is None:
            return
        for key in announcement.keys:
            others = self._by_key[key]
            others.remove(announcement)
            if not others:
                del self._by_key[key]

    def is_open(self, announcement: Announcement) -> bool:
        """Whether it was not withdrawn."""
        return announcement.serial in self._open

    def along(self, keys: Sequence[bytes]) -> Iterator[tuple[int, Announcement]]:
        """What is announced of the chain `keys`: pages of the prefix and who announced it, the longest
        prefix first."""
        for pages in range(len(keys), 0, -1):
            for announcement in self._by_key.get(keys[pages - 1], ()):
                yield pages, announcement

    def check_integrity(self) -> None:
        """Look all keys up.

        Raises:
            AssertionError: an announcement is not found by its keys, or is found without being open.
        """
        found = [(key, a.serial) for key, all_of in self._by_key.items() for a in all_of]
        if sorted(found) != sorted((key, a.serial) for a in self._open.values() for key in a.keys):
            raise AssertionError("the announced keys are not those of the open announcements")
