"""Copies between an engine's cache and a host pool."""

from __future__ import annotations

from typing import Protocol

from hicache.copies.row_copy import PendingCopy
from hicache.copies.runs import IndexArray


class CacheCopies(Protocol):
    """They are ordered like steps: a step that is launched later reads what a load brings, and a store
    reads what the steps before it wrote, whatever later steps write. All of them may raise
    `HostPoolError`: the device refuses, and no byte is under way."""

    def load_pages(self, pages: IndexArray, host_slots: IndexArray) -> PendingCopy:
        """Host row `host_slots[i]` into page `pages[i]`."""
        ...

    def store_pages(self, pages: IndexArray, host_slots: IndexArray) -> PendingCopy:
        """Page `pages[i]` into host row `host_slots[i]`."""
        ...

    def load_state(self, slot: int, position: int, host_slot: int) -> PendingCopy:
        """Host state row into `slot`, as the state after `position` tokens."""
        ...

    def store_state(self, slot: int, position: int, host_slot: int) -> PendingCopy:
        """The state of `slot` as it was after `position` tokens into a host state row. `position` is
        one of the prompt's two anchors (see `CacheLayout.replay_tokens`), or where its last chunk
        ended."""
        ...
