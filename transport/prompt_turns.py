"""In which order prompts are taken: shorter ones sooner, but a long one is passed over for a bounded time."""

from __future__ import annotations

import heapq
import itertools
from typing import Final, Generic, TypeVar

from transport.ids import RequestId

LONG_PROMPT_BYTES: Final = 64 << 10
"""A longer prompt goes the way of the long ones, so that the others never wait for it. One of this
size takes some 20 ms to encode."""
BYTES_PER_SECOND: Final = 1 << 20
"""A prompt of this size is passed over by shorter ones that come up to a second later."""

_STALE_ALLOWANCE: Final = 64

ItemT = TypeVar("ItemT")


class PromptTurns(Generic[ItemT]):
    """Prompts that wait, each under its request's id. Taking one out costs the same wherever it stands."""

    def __init__(self) -> None:
        self._items: dict[RequestId, tuple[int, ItemT]] = {}
        self._heap: list[tuple[float, int, RequestId]] = []
        self._entries = itertools.count()

    def __len__(self) -> int:
        return len(self._items)

    def add(self, request_id: RequestId, item: ItemT, arrived: float, size: int) -> None:
        """`arrived` in seconds, `size` in bytes. An item that waits already under this id is replaced."""
        if len(self._heap) > 2 * len(self._items) + _STALE_ALLOWANCE:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)
        entry = next(self._entries)
        self._items[request_id] = (entry, item)
        heapq.heappush(self._heap, (arrived + size / BYTES_PER_SECOND, entry, request_id))

    def first(self) -> ItemT | None:
        """The item whose turn it is; it stays."""
        while self._heap and not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)
        return self._items[self._heap[0][2]][1] if self._heap else None

    def pop(self, request_id: RequestId) -> ItemT | None:
        found = self._items.pop(request_id, None)
        return None if found is None else found[1]

    def clear(self) -> None:
        self._items.clear()
        self._heap.clear()

    def _is_current(self, entry: tuple[float, int, RequestId]) -> bool:
        return self._items.get(entry[2], (-1,))[0] == entry[1]
