"""Prompts whose prefill is under way, so that others with the same beginning can wait for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count

from hicache.outcomes import Announcement


class Announcements:
    """Keys of the positions where hits will be possible, each as often as it is announced."""

    def __init__(self) -> None:
        self._open: dict[int, Announcement] = {}
        self._keys: Counter[bytes] = Counter()
        self._serials = count()

    def open(self, keys: Sequence[bytes]) -> Announcement:
        """Announce prefixes by the key of their last page."""
        announcement = Announcement(tuple(keys), next(self._serials))
        self._open[announcement.serial] = announcement
        self._keys.update(announcement.keys)
        return announcement

    def close(self, announcement: Announcement) -> None:
        """Withdraw. Idempotent."""
        if self._open.pop(announcement.serial, None) is not None:
            self._keys.subtract(announcement.keys)
            for key in announcement.keys:
                if not self._keys[key]:
                    del self._keys[key]

    def longest(self, keys: Sequence[bytes]) -> int:
        """Pages of the longest prefix of the chain `keys` that is announced."""
        return next((n for n in range(len(keys), 0, -1) if keys[n - 1] in self._keys), 0)

    def check_integrity(self) -> None:
        """Recount the keys.

        Raises:
            AssertionError: a key is counted wrongly.
        """
        if self._keys != Counter(k for a in self._open.values() for k in a.keys):
            raise AssertionError("the announced keys are not those of the open announcements")
