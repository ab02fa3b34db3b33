"""The rows of a pool and the index over them, changed together.

A row is free, or found through the index, or being written by a store, or kept by pins alone after a
flush. This module moves rows between these four.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from hicache.cache.index import ABSENT, PinnedPrefix, PrefixIndex
from hicache.copies.runs import IndexArray
from hicache.keys import KEY_BYTES
from hicache.pool.headers import HeaderTable
from hicache.pool.host_pool import HostPool
from hicache.pool.row_table import RowTable

_NO_PARENT: Final = bytes(KEY_BYTES)
_SPARE_SHARE: Final = 32
"""One of so many host pages is kept free: with a choice of free runs, a prompt's pages stay together.
After thousands of turns of growing conversations (simulated) they lie in runs of 75 to 97 pages, with
none kept free in runs of 10; the hit rate is the same."""
_SPARE_STEP: Final = 512
"""Pages that one store may evict beyond its own need, so that none takes long."""


class PoolContent:
    """All host pages and host states of one pool. Whoever takes some (at most `room_for_…`) publishes or
    frees them. Not thread-safe."""

    def __init__(self, pool: HostPool, clock: Callable[[], int]) -> None:
        """Take over what the pool holds: valid rows whose whole prefix is valid too."""
        self._clock = clock
        self._last_stamp = 0
        self.index = PrefixIndex(pool.geometry.num_pages, pool.geometry.num_states)
        self._spare_pages = pool.geometry.num_pages // _SPARE_SHARE
        self.evicted_pages = 0
        self.evicted_states = 0
        pages = self._recover_pages(pool.page_headers)
        states = self._recover_states(pool.state_headers)
        self.recovered_pages, self.recovered_states = len(pages), len(states)
        self.pages = RowTable(pool.page_headers, pages)
        self.states = RowTable(pool.state_headers, states)

    def next_stamp(self) -> int:
        """Time of a use, in the clock's nanoseconds; never the same twice, so that order is total."""
        self._last_stamp = max(self._clock(), self._last_stamp + 1)
        return self._last_stamp

    def seconds_since(self, stamp: int) -> float:
        return max(0, self._clock() - stamp) / 1e9

    # ---- from free to being written to found --------------------------------------------------

    @property
    def room_for_pages(self) -> int:
        return self.pages.num_free + self.index.num_evictable_pages

    @property
    def room_for_states(self) -> int:
        return self.states.num_free + self.index.num_evictable_states

    def take_pages(self, count: int) -> IndexArray:
        short = count + self._spare_pages - self.pages.num_free
        short = min(short, count + _SPARE_STEP, self.index.num_evictable_pages)
        evicted = [self.index.evict_page() for _ in range(short)]
        states = [e.state for e in evicted if e.state != ABSENT]
        self.pages.free(e.page for e in evicted)
        self.states.free(states)
        self.evicted_pages += len(evicted)
        self.evicted_states += len(states)
        return self.pages.take(count)

    def take_states(self, count: int) -> IndexArray:
        short = count - self.states.num_free
        evicted = [self.index.evict_state() for _ in range(short)]
        self.states.free(evicted)
        self.evicted_states += len(evicted)
        return self.states.take(count)

    def publish_pages(
        self, pages: IndexArray, keys: Sequence[bytes], parents: Sequence[bytes | None], stamp: int
    ) -> int:
        """The pages are whole. `parents` are the keys before (None: a first page), parents come first.

        Returns:
            How many could be added: from the first page on whose parent is missing, none can.
        """
        depths: list[int] = []
        for page, key, parent in zip(pages.tolist(), keys, parents, strict=True):
            above = ABSENT if parent is None else self.index.page(parent)
            if parent is not None and above == ABSENT:
                break
            self.index.insert_page(key, above, page, stamp)
            depths.append(self.index.depth(page))
        added = len(depths)
        above_keys = [parent or _NO_PARENT for parent in parents[:added]]
        self.pages.publish(pages[:added], keys[:added], above_keys, depths, stamp)
        return added

    def publish_state(self, state: int, key: bytes, stamp: int) -> bool:
        page = self.index.page(key)
        if page == ABSENT:
            return False
        self.index.insert_state(page, state, stamp)
        row, depth = np.array([state], np.int32), self.index.depth(page)
        self.states.publish(row, [key], [_NO_PARENT], [depth], stamp)
        return True

    # ---- pins ---------------------------------------------------------------------------------

    def pin(self, prefix: PinnedPrefix, stamp: int) -> None:
        self.index.pin(prefix, stamp)
        self.pages.touch(prefix.pages, stamp)
        if prefix.state != ABSENT:
            self.states.touch(np.array([prefix.state], np.int32), stamp)

    def unpin(self, prefix: PinnedPrefix) -> None:
        pages, states = self.index.unpin(prefix)
        self.pages.free(pages)
        self.states.free(states)

    def flush(self) -> None:
        self.pages.invalidate_all()
        self.states.invalidate_all()
        pages, states = self.index.clear()
        self.pages.free(pages)
        self.states.free(states)

    # ---- a pool that an earlier process filled ------------------------------------------------

    def _recover_pages(self, headers: HeaderTable) -> list[int]:
        index, good = self.index, list[int]()
        headers.invalidate(headers.damaged())
        for found in headers.valid_headers():
            parent = ABSENT if found.depth == 0 else index.page(found.parent)
            whole = found.depth == 0 or (
                parent != ABSENT and index.depth(parent) + 1 == found.depth
            )
            if whole and found.key not in index:
                index.insert_page(found.key, parent, found.row, found.last_use)
                good.append(found.row)
                self._last_stamp = max(self._last_stamp, found.last_use)
        return good

    def _recover_states(self, headers: HeaderTable) -> list[int]:
        index, good = self.index, list[int]()
        headers.invalidate(headers.damaged())
        for found in headers.valid_headers():
            page = index.page(found.key)
            if page != ABSENT and index.state(page) == ABSENT and index.depth(page) == found.depth:
                index.insert_state(page, found.row, found.last_use)
                good.append(found.row)
                self._last_stamp = max(self._last_stamp, found.last_use)
        return good

    # ---- checking -----------------------------------------------------------------------------

    def check_integrity(
        self,
        pinned: Sequence[PinnedPrefix],
        writing_pages: Sequence[int],
        writing_states: Sequence[int],
    ) -> None:
        self.index.check_integrity(pinned)
        pages, states = self.index.pages_by_key(), self.index.states_by_key()
        kept_pages, kept_states = self.index.detached()
        for table, rows, kept, writing in (
            (self.pages, pages, kept_pages, writing_pages),
            (self.states, states, kept_states, writing_states),
        ):
            valid = {(key, row, self.index.depth(pages[key])) for key, row in rows.items()}
            table.check_integrity(valid, kept, writing)
