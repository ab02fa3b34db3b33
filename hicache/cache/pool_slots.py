"""Slots of a pool, their headers and the index over them, changed together.

A slot is free, or found through the index, or being written by a store, or kept by pins alone after a
flush. This module moves slots between these four and keeps the pool's headers in step, in the order
that makes a kill at any moment harmless: a header is invalid before its slot can be handed out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from hicache.cache.index import NO_SLOT, PinnedPrefix, PrefixIndex
from hicache.keys import KEY_BYTES
from hicache.pool.host_pool import HostPool
from hicache.pool.run_allocator import RunAllocator
from hicache.pool.slot_headers import VALID, WRITING, HeaderTable, SlotArray

_NO_PARENT: Final = bytes(KEY_BYTES)
_SPARE_SHARE: Final = 32
"""One of so many page slots is kept free: with a choice of free runs, a prompt's rows stay together.
After thousands of turns of growing conversations (simulated) rows lie in runs of 75 to 97 pages, with
none kept free in runs of 10; the hit rate is the same."""
_SPARE_STEP: Final = 512
"""Pages that one store may evict beyond its own need, so that none takes long."""


class PoolSlots:
    """All page slots and state slots of one pool. Not thread-safe."""

    def __init__(self, pool: HostPool, clock: Callable[[], int]) -> None:
        """Take over what the pool holds: valid rows whose whole prefix is valid too."""
        self._pool = pool
        self._clock = clock
        self._last_stamp = 0
        self.index = PrefixIndex(pool.geometry.num_pages, pool.geometry.num_states)
        self._spare_pages = pool.geometry.num_pages // _SPARE_SHARE
        self.evicted_pages = 0
        self.evicted_states = 0
        pages = self._recover_pages()
        states = self._recover_states()
        self.recovered_pages, self.recovered_states = len(pages), len(states)
        self._free_pages = RunAllocator(pool.geometry.num_pages, pages)
        self._free_states = RunAllocator(pool.geometry.num_states, states)

    def next_stamp(self) -> int:
        """Time of a use, in the clock's nanoseconds; never the same twice, so that order is total."""
        self._last_stamp = max(self._clock(), self._last_stamp + 1)
        return self._last_stamp

    def seconds_since(self, stamp: int) -> float:
        return max(0, self._clock() - stamp) / 1e9

    # ---- how many -----------------------------------------------------------------------------

    @property
    def num_free_pages(self) -> int:
        return self._free_pages.num_free

    @property
    def num_free_states(self) -> int:
        return self._free_states.num_free

    @property
    def room_for_pages(self) -> int:
        """Page slots that `take_pages` can give."""
        return self._free_pages.num_free + self.index.num_evictable_pages

    @property
    def room_for_states(self) -> int:
        """State slots that `take_states` can give."""
        return self._free_states.num_free + self.index.num_evictable_states

    # ---- from free to being written to found --------------------------------------------------

    def take_pages(self, count: int) -> SlotArray:
        """Slots to write `count` pages into; evicts what is needed least.

        Raises:
            IndexError: `count` is more than `room_for_pages`.
        """
        short = count + self._spare_pages - self._free_pages.num_free
        short = min(short, count + _SPARE_STEP, self.index.num_evictable_pages)
        evicted = [self.index.evict_page() for _ in range(short)]
        self.free_pages(np.array([e.page for e in evicted], np.int32))
        states = [e.state for e in evicted if e.state != NO_SLOT]
        self.free_states(np.array(states, np.int32))
        self.evicted_pages += len(evicted)
        self.evicted_states += len(states)
        slots = self._free_pages.take(count)
        self._pool.page_headers.begin_write(slots)
        return slots

    def take_states(self, count: int) -> SlotArray:
        """Slots to write `count` states into; evicts what is needed least.

        Raises:
            IndexError: `count` is more than `room_for_states`.
        """
        short = count - self._free_states.num_free
        evicted = [self.index.evict_state() for _ in range(short)]
        self.free_states(np.array(evicted, np.int32))
        self.evicted_states += len(evicted)
        slots = self._free_states.take(count)
        self._pool.state_headers.begin_write(slots)
        return slots

    def publish_pages(
        self, slots: SlotArray, keys: Sequence[bytes], parents: Sequence[bytes | None], stamp: int
    ) -> int:
        """The rows are whole. `parents` are the keys before (None: a first page), parents come first.

        Returns:
            How many could be added: from the first page on whose parent is missing, none can.
        """
        added = 0
        for slot, key, parent in zip(slots.tolist(), keys, parents, strict=True):
            above = NO_SLOT if parent is None else self.index.page(parent)
            if parent is not None and above == NO_SLOT:
                break
            self.index.insert_page(key, above, slot, stamp)
            added += 1
        depths = [self.index.depth(slot) for slot in slots[:added].tolist()]
        self._pool.page_headers.publish(
            slots[:added],
            keys[:added],
            [parent or _NO_PARENT for parent in parents[:added]],
            np.array(depths, np.uint32),
            stamp,
        )
        return added

    def publish_state(self, slot: int, key: bytes, stamp: int) -> bool:
        """The state's row is whole; `key` is of the last page before it. False: that page is not there."""
        page = self.index.page(key)
        if page == NO_SLOT:
            return False
        self.index.insert_state(page, slot, stamp)
        depth = np.array([self.index.depth(page)], np.uint32)
        self._pool.state_headers.publish(
            np.array([slot], np.int32), [key], [_NO_PARENT], depth, stamp
        )
        return True

    # ---- pins ---------------------------------------------------------------------------------

    def pin(self, prefix: PinnedPrefix, stamp: int) -> None:
        """Keep a prefix and note its use, also for the next process."""
        self.index.pin(prefix, stamp)
        self._pool.page_headers.touch(prefix.pages, stamp)
        if prefix.state != NO_SLOT:
            self._pool.state_headers.touch(np.array([prefix.state], np.int32), stamp)

    def unpin(self, prefix: PinnedPrefix) -> None:
        pages, states = self.index.unpin(prefix)
        self._free_pages.give_back(np.array(pages, np.int32))
        self._free_states.give_back(np.array(states, np.int32))

    # ---- to free ------------------------------------------------------------------------------

    def free_pages(self, slots: SlotArray) -> None:
        """Return slots that the index does not know."""
        self._pool.page_headers.invalidate(slots)
        self._free_pages.give_back(slots)

    def free_states(self, slots: SlotArray) -> None:
        """Return slots that the index does not know."""
        self._pool.state_headers.invalidate(slots)
        self._free_states.give_back(slots)

    def flush(self) -> None:
        """Find nothing any more. Slots that are pinned or being written stay where they are."""
        self._pool.page_headers.invalidate(self._pool.page_headers.slots_with_status(VALID))
        self._pool.state_headers.invalidate(self._pool.state_headers.slots_with_status(VALID))
        pages, states = self.index.clear()
        self._free_pages.give_back(np.array(pages, np.int32))
        self._free_states.give_back(np.array(states, np.int32))

    # ---- a pool that an earlier process filled ------------------------------------------------

    def _recover_pages(self) -> list[int]:
        table, index = self._pool.page_headers, self.index
        table.invalidate(table.damaged())
        good: list[int] = []
        for found in table.valid_slots():
            parent = NO_SLOT if found.depth == 0 else index.page(found.parent)
            whole = found.depth == 0 or (
                parent != NO_SLOT and index.depth(parent) + 1 == found.depth
            )
            if whole and found.key not in index:
                index.insert_page(found.key, parent, found.slot, found.last_use)
                good.append(found.slot)
                self._last_stamp = max(self._last_stamp, found.last_use)
        _keep_only(table, good)
        return good

    def _recover_states(self) -> list[int]:
        table, index = self._pool.state_headers, self.index
        table.invalidate(table.damaged())
        good: list[int] = []
        for found in table.valid_slots():
            page = index.page(found.key)
            if (
                page != NO_SLOT
                and index.state(page) == NO_SLOT
                and index.depth(page) == found.depth
            ):
                index.insert_state(page, found.slot, found.last_use)
                good.append(found.slot)
                self._last_stamp = max(self._last_stamp, found.last_use)
        _keep_only(table, good)
        return good

    # ---- checking -----------------------------------------------------------------------------

    def check_integrity(
        self, pinned: Sequence[PinnedPrefix], writing_pages: SlotArray, writing_states: SlotArray
    ) -> None:
        """Compare index, allocators and headers with each other, O(slots).

        Args:
            pinned: all prefixes pinned now.
            writing_pages: page slots taken and neither published nor freed.
            writing_states: the same of states.

        Raises:
            AssertionError: they differ.
        """
        self.index.check_integrity(pinned)
        pages, states = self.index.page_slots(), self.index.state_slots()
        kept_pages, kept_states = self.index.detached_slots()
        self._free_pages.check_integrity([*pages.values(), *kept_pages, *writing_pages.tolist()])
        self._free_states.check_integrity(
            [*states.values(), *kept_states, *writing_states.tolist()]
        )
        for table, slots, writing in (
            (self._pool.page_headers, pages, writing_pages),
            (self._pool.state_headers, states, writing_states),
        ):
            headers = {(v.key, v.slot, v.depth) for v in table.valid_slots()}
            if headers != {(k, s, self.index.depth(pages[k])) for k, s in slots.items()}:
                raise AssertionError("the pool's headers are not what the index finds")
            if (
                len(table.damaged())
                or sorted(writing.tolist()) != table.slots_with_status(WRITING).tolist()
            ):
                raise AssertionError("a header is damaged, or says writing of another slot")


def _keep_only(table: HeaderTable, slots: list[int]) -> None:
    keep = np.zeros(table.count, np.bool_)
    keep[slots] = True
    table.invalidate(np.flatnonzero(~keep).astype(np.int32))
