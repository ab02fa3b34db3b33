"""Free and used indexes of a fixed range: pages of the page pool, rows of the slot tables."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class IndexPool:
    """Hands out the lowest free indexes of 0 .. count-1, so that neighbours go out together."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = list(range(count))
        self._used: set[int] = set()

    @property
    def count(self) -> int:
        return self._count

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._used)

    def take(self, count: int) -> list[int]:
        """Hand out `count` indexes. The caller owns them until `give_back`.

        Raises:
            IndexError: fewer are free; then nothing is taken.
        """
        if count > len(self._free):
            raise IndexError(f"{count} wanted, {len(self._free)} free")
        taken = [heapq.heappop(self._free) for _ in range(count)]
        self._used.update(taken)
        return taken

    def give_back(self, indexes: Iterable[int]) -> None:
        """Raises `KeyError` if one of the indexes was not handed out."""
        for index in indexes:
            self._used.remove(index)
            heapq.heappush(self._free, index)

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Raises `AssertionError` if an index is lost, owned twice, or both free and owned."""
        owners = list(owned)
        if len(set(owners)) != len(owners):
            raise AssertionError("an index has two owners")
        if set(owners) != self._used:
            raise AssertionError(
                f"owned but not handed out: {sorted(set(owners) - self._used)[:8]}, "
                f"handed out but not owned: {sorted(self._used - set(owners))[:8]}"
            )
        if len(self._free) + len(self._used) != self._count or self._used & set(self._free):
            raise AssertionError("an index is lost, or both free and used")
