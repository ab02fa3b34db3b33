"""Items in order of their last use, O(log n) an operation, also when one comes in with an old stamp."""

from __future__ import annotations

import heapq


class LruQueue:
    """A heap of (stamp, item) in which outdated entries stay until they come up or outnumber the rest."""

    def __init__(self) -> None:
        self._stamps: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._stamps)

    def put(self, item: int, stamp: int) -> None:
        if self._stamps.get(item) == stamp:
            return
        self._stamps[item] = stamp
        heapq.heappush(self._heap, (stamp, item))
        if len(self._heap) > 2 * len(self._stamps) + 64:
            self._heap = [(stamp, item) for item, stamp in self._stamps.items()]
            heapq.heapify(self._heap)

    def discard(self, item: int) -> None:
        self._stamps.pop(item, None)

    def pop(self) -> int:
        """Take out the item with the lowest stamp.

        Raises:
            IndexError: there is none.
        """
        while True:
            stamp, item = heapq.heappop(self._heap)
            if self._stamps.get(item) == stamp:
                del self._stamps[item]
                return item

    def clear(self) -> None:
        self._stamps.clear()
        self._heap.clear()

    def stamps(self) -> dict[int, int]:
        return dict(self._stamps)
