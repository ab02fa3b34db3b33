"""The hash-chain index: which host page has which key, and what may be evicted next.

Pages form a tree: the parent of a page is the page before it, and a page is never there without its
parent. A state belongs to the page that ends its prefix. What is evicted:

* Only leaves, so that every prefix stays whole. Leaves without a state go first: for models with
  states nothing can hit them, as a hit ends at a state. Then leaves with a state. Each by last use.
* States that longer prefixes of one chain have superseded, by last use. Then the rest: the last state
  of a chain, and states at which chains part, since all of those chains depend on them.
* Nothing that is pinned. A pin covers a prefix from its first page on.

Pages and states are numbers of rows in the pool; this module knows no bytes. All calls are O(log n) or O(1) a
page, except `clear` and the reports for people.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hicache.cache.lru import LruQueue
from hicache.copies.runs import IndexArray

ABSENT = -1


class EvictedPage(NamedTuple):
    """What an eviction freed."""

    page: int
    state: int
    """ABSENT: the page had none."""


class PinnedPrefix(NamedTuple):
    """What a user of a prefix holds: its pages, from the first on, and one state of it or ABSENT."""

    pages: IndexArray
    state: int


class PrefixIndex:
    """Pages, states and pins. Not thread-safe."""

    def __init__(self, num_pages: int, num_states: int) -> None:
        self._page_at: dict[bytes, int] = {}
        # By page.
        self._key_of: list[bytes | None] = [None] * num_pages
        self._parent_of = [ABSENT] * num_pages
        self._depth_of = [0] * num_pages
        self._num_children = [0] * num_pages
        self._stateful_children = [0] * num_pages  # children with a state in their subtree
        self._state_of = [ABSENT] * num_pages
        self._present = np.zeros(num_pages, np.bool_)
        self._page_pins = np.zeros(num_pages, np.int32)
        self._page_use = np.zeros(num_pages, np.int64)
        self._page_hits = np.zeros(num_pages, np.int64)
        # By state.
        self._page_of = [ABSENT] * num_states
        self._state_pins = [0] * num_states
        self._state_use = [0] * num_states

        self._bare_leaves = LruQueue()
        self._stateful_leaves = LruQueue()
        self._superseded_states = LruQueue()
        self._needed_states = LruQueue()
        self._num_states = 0
        self._num_pinned_pages = 0  # detached ones included
        # Cleared from the index while pinned; they are free when the last pin goes.
        self._detached_pages: set[int] = set()
        self._detached_states: set[int] = set()

    # ---- looking up ---------------------------------------------------------------------------

    def __contains__(self, key: bytes) -> bool:
        return key in self._page_at

    @property
    def num_pages(self) -> int:
        return len(self._page_at)

    @property
    def num_states(self) -> int:
        return self._num_states

    @property
    def num_pinned_pages(self) -> int:
        """Pages that somebody reads or depends on, those that can be found no more included."""
        return self._num_pinned_pages

    @property
    def num_evictable_pages(self) -> int:
        # Pins cover whole prefixes: all pages without a pin can go, one after the other.
        return len(self._page_at) - (self._num_pinned_pages - len(self._detached_pages))

    @property
    def num_evictable_states(self) -> int:
        return len(self._superseded_states) + len(self._needed_states)

    def page(self, key: bytes) -> int:
        return self._page_at.get(key, ABSENT)

    def depth(self, page: int) -> int:
        return self._depth_of[page]

    def state(self, page: int) -> int:
        return self._state_of[page]

    def match(self, keys: Sequence[bytes]) -> IndexArray:
        """The pages of the longest prefix of the chain `keys` that is there.

        It need not look at every key: a page is never there without its parent, as only leaves are
        evicted and a page is inserted below one that is there. So the keys that are there come first.
        """
        count = bisect_left(range(len(keys)), True, key=lambda at: keys[at] not in self._page_at)
        return np.fromiter(map(self._page_at.__getitem__, keys[:count]), np.int32, count)

    # ---- putting in ---------------------------------------------------------------------------

    def insert_page(self, key: bytes, parent: int, page: int, stamp: int) -> None:
        """Add a page below `parent` (ABSENT: a first page). Its key is new and the page unused."""
        self._page_at[key] = page
        self._key_of[page] = key
        self._present[page] = True
        self._parent_of[page] = parent
        self._page_use[page] = stamp
        self._page_hits[page] = 0
        self._depth_of[page] = 0
        if parent != ABSENT:
            self._depth_of[page] = self._depth_of[parent] + 1
            self._num_children[parent] += 1
            self._bare_leaves.discard(parent)
            self._stateful_leaves.discard(parent)
        self._file_page(page)

    def insert_state(self, page: int, state: int, stamp: int) -> None:
        self._state_of[page] = state
        self._page_of[state] = page
        self._state_use[state] = stamp
        self._num_states += 1
        if not self._stateful_children[page]:
            self._change_stateful(page, +1)
        self._file_state(state)
        self._file_page(page)

    # ---- pins ---------------------------------------------------------------------------------

    def pin(self, prefix: PinnedPrefix, stamp: int) -> None:
        pages, state = prefix
        self._num_pinned_pages += int(np.count_nonzero(self._page_pins[pages] == 0))
        self._page_pins[pages] += 1
        self._page_use[pages] = stamp
        if state != ABSENT:
            self._state_pins[state] += 1
            self._state_use[state] = stamp
            self._file_state(state)
        self._file_end(pages)

    def unpin(self, prefix: PinnedPrefix) -> tuple[list[int], list[int]]:
        """Undo one `pin`. Returns the pages and states that became free by it."""
        pages, state = prefix
        self._page_pins[pages] -= 1
        idle = pages[self._page_pins[pages] == 0]
        self._num_pinned_pages -= len(idle)
        free_pages = self._detached_pages.intersection(
            idle.tolist() if self._detached_pages else ()
        )
        self._detached_pages -= free_pages
        free_states: list[int] = []
        if state != ABSENT:
            self._state_pins[state] -= 1
            if state not in self._detached_states:
                self._file_state(state)
            elif not self._state_pins[state]:
                self._detached_states.remove(state)
                free_states.append(state)
        self._file_end(pages)
        return sorted(free_pages), free_states

    def count_hit(self, pages: IndexArray) -> None:
        self._page_hits[pages] += 1

    # ---- taking out ---------------------------------------------------------------------------

    def evict_page(self) -> EvictedPage:
        """Take out the leaf page that is needed least, with its state.

        Raises:
            IndexError: no page may be evicted.
        """
        page = self._bare_leaves.pop() if self._bare_leaves else self._stateful_leaves.pop()
        state = self._state_of[page]
        if state != ABSENT:
            self._superseded_states.discard(state)
            self._needed_states.discard(state)
            self._remove_state(state)
        key, parent = self._key_of[page], self._parent_of[page]
        assert key is not None
        del self._page_at[key]
        self._key_of[page] = None
        self._present[page] = False
        self._bare_leaves.discard(page)
        self._stateful_leaves.discard(page)
        if parent != ABSENT:
            self._num_children[parent] -= 1
            self._file_page(parent)
        return EvictedPage(page, state)

    def evict_state(self) -> int:
        first = self._superseded_states or self._needed_states
        state = first.pop()
        self._remove_state(state)
        return state

    def clear(self) -> tuple[list[int], list[int]]:
        """Forget everything. Returns the pages and states free at once; pinned ones follow by `unpin`."""
        pages = [page for page in self._page_at.values() if not self._page_pins[page]]
        states = [s for s, page in enumerate(self._page_of) if page != ABSENT]
        self._detached_pages.update(set(self._page_at.values()).difference(pages))
        self._detached_states.update(s for s in states if self._state_pins[s])
        for page in self._page_at.values():
            self._key_of[page] = None
            self._num_children[page] = self._stateful_children[page] = 0
            self._state_of[page] = ABSENT
        for state in states:
            self._page_of[state] = ABSENT
        self._num_states = 0
        self._page_at.clear()
        self._present[:] = False
        for queue in (
            self._bare_leaves,
            self._stateful_leaves,
            self._superseded_states,
            self._needed_states,
        ):
            queue.clear()
        return pages, [s for s in states if s not in self._detached_states]

    # ---- for people ---------------------------------------------------------------------------

    def oldest_use(self) -> int | None:
        return int(self._page_use[self._present].min()) if self._page_at else None

    def most_used(self, count: int) -> list[int]:
        """The last pages of the prefixes with the highest length times hits, each prefix as long as its
        hits are the same."""
        pages = np.flatnonzero(self._present)
        parents = np.asarray(self._parent_of)[pages]
        beyond = np.zeros(len(self._page_hits), np.int64)  # most hits of any child
        inner = parents != ABSENT
        np.maximum.at(beyond, parents[inner], self._page_hits[pages[inner]])
        ends = pages[self._page_hits[pages] > beyond[pages]]
        lengths = np.asarray(self._depth_of)[ends] + 1
        best = np.argsort(-lengths * self._page_hits[ends], kind="stable")[:count]
        return [int(page) for page in ends[best]]

    def hits(self, page: int) -> int:
        return int(self._page_hits[page])

    def last_use(self, page: int) -> int:
        return int(self._page_use[page])

    def pages_by_key(self) -> dict[bytes, int]:
        return dict(self._page_at)

    def states_by_key(self) -> dict[bytes, int]:
        return {k: self._state_of[p] for k, p in self._page_at.items() if self._state_of[p] >= 0}

    def detached(self) -> tuple[set[int], set[int]]:
        """Pages and states that only their pins keep; copies."""
        return set(self._detached_pages), set(self._detached_states)

    def check_integrity(self, pinned: Sequence[PinnedPrefix]) -> None:
        self._check_tree()
        page_pins = np.zeros_like(self._page_pins)
        state_pins = [0] * len(self._state_pins)
        for pages, state in pinned:
            page_pins[pages] += 1
            if state != ABSENT:
                state_pins[state] += 1
        _expect((page_pins == self._page_pins).all(), "pins of pages")
        _expect(state_pins == self._state_pins, "pins of states")
        _expect(self._num_pinned_pages == np.count_nonzero(page_pins), "count of pinned pages")
        _expect(all(page_pins[p] for p in self._detached_pages), "a detached page without a pin")
        _expect(all(state_pins[s] for s in self._detached_states), "a detached state without a pin")
        _expect(not self._detached_pages & set(self._page_at.values()), "a page found and detached")
        self._check_queues()

    def _check_tree(self) -> None:
        children: list[int] = [0] * len(self._key_of)
        stateful = list(children)
        pages = sorted(self._page_at.values(), key=self._depth_of.__getitem__)
        for page in reversed(pages):
            parent = self._parent_of[page]
            key = self._key_of[page]
            _expect(key is not None and self._page_at[key] == page, "a page with another's key")
            has_state = self._state_of[page] != ABSENT
            _expect(
                not has_state or self._page_of[self._state_of[page]] == page, "owner of a state"
            )
            _expect((parent == ABSENT) == (self._depth_of[page] == 0), "depth of a first page")
            if parent != ABSENT:
                _expect(self._key_of[parent] is not None, "a page without its parent")
                _expect(self._depth_of[parent] == self._depth_of[page] - 1, "depth of a page")
                children[parent] += 1
                stateful[parent] += has_state or stateful[page] > 0
        _expect(len(pages) == len(set(pages)) == len(self._page_at), "a page with two keys")
        _expect(np.flatnonzero(self._present).tolist() == sorted(pages), "marks of present pages")
        for page in pages:
            _expect(self._num_children[page] == children[page], "count of children")
            _expect(self._stateful_children[page] == stateful[page], "count of stateful children")
        owners = [page for page in self._page_of if page != ABSENT]
        _expect(len(owners) == self._num_states, "count of states")
        _expect(sorted(owners) == sorted(p for p in pages if self._state_of[p] >= 0), "states")

    def _check_queues(self) -> None:
        bare: dict[int, int] = {}
        stateful, superseded, needed = bare.copy(), bare.copy(), bare.copy()
        for page in self._page_at.values():
            if not self._num_children[page] and not self._page_pins[page]:
                queue = bare if self._state_of[page] == ABSENT else stateful
                queue[page] = int(self._page_use[page])
        for state, page in enumerate(self._page_of):
            if page != ABSENT and not self._state_pins[state]:
                queue = superseded if self._stateful_children[page] == 1 else needed
                queue[state] = self._state_use[state]
        _expect(bare == self._bare_leaves.stamps(), "leaves without a state")
        _expect(stateful == self._stateful_leaves.stamps(), "leaves with a state")
        _expect(superseded == self._superseded_states.stamps(), "superseded states")
        _expect(needed == self._needed_states.stamps(), "needed states")

    # ---- keeping the order of eviction --------------------------------------------------------

    def _file_end(self, pages: IndexArray) -> None:
        # Only the last page of a prefix can be a leaf.
        if len(pages) and self._key_of[pages[-1]] is not None:
            self._file_page(int(pages[-1]))

    def _file_page(self, page: int) -> None:
        self._bare_leaves.discard(page)
        self._stateful_leaves.discard(page)
        if not self._num_children[page] and not self._page_pins[page]:
            bare = self._state_of[page] == ABSENT
            queue = self._bare_leaves if bare else self._stateful_leaves
            queue.put(page, int(self._page_use[page]))

    def _file_state(self, state: int) -> None:
        self._superseded_states.discard(state)
        self._needed_states.discard(state)
        if not self._state_pins[state]:
            superseded = self._stateful_children[self._page_of[state]] == 1
            queue = self._superseded_states if superseded else self._needed_states
            queue.put(state, self._state_use[state])

    def _remove_state(self, state: int) -> None:
        page = self._page_of[state]
        self._page_of[state] = self._state_of[page] = ABSENT
        self._num_states -= 1
        if not self._stateful_children[page]:
            self._change_stateful(page, -1)
        self._file_page(page)

    def _change_stateful(self, page: int, change: int) -> None:
        """The subtree of `page` got its first state (+1) or lost its last (-1): tell the pages above,
        up to the first for whose own subtree that changes nothing."""
        parent = self._parent_of[page]
        while parent != ABSENT:
            self._stateful_children[parent] += change
            if self._state_of[parent] != ABSENT:
                self._file_state(self._state_of[parent])
                return
            if self._stateful_children[parent] > (1 if change > 0 else 0):
                return
            parent = self._parent_of[parent]


def _expect(right: bool | np.bool_, what: str) -> None:
    if not right:
        raise AssertionError(f"The prefix index is wrong: {what}.")
