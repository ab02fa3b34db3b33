"""Copies between an engine's cache and a host pool, for any engine: it says where its pages lie and how
its states are cut out and put back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from hicache.copies.row_copy import PendingCopy, RowCopier
from hicache.copies.rows import HostRows, RowArray, Rows
from hicache.copies.runs import IndexArray


class StateCodec(Protocol):
    """How the state of a sequence becomes a host state and back. On a GPU both go by the engine's stream,
    and return before the copy is over."""

    def store_state(self, slot: int, position: int, host_state: RowArray) -> None:
        """Write the state that the sequence in `slot` had after `position` tokens. `position` is one
        of the prompt's two anchors (see `CacheLayout.replay_tokens`), or where its last chunk ended.

        Raises:
            HostPoolError: the device has no memory left to cut it out.
        """
        ...

    def load_state(self, slot: int, position: int, host_state: RowArray) -> None:
        """Give `slot` the state after `position` tokens, before its first chunk, which starts there."""
        ...


@dataclass(frozen=True)
class DeviceCache:
    """What an engine offers to be copied."""

    pages: Rows
    """Row p is device page p, as long as a host page."""
    states: StateCodec | None = None
    """None: the model keeps no state beside its pages."""


class CacheCopies:
    """Made by `hicache.copies.open.open_cache_copies`.

    Copies are ordered like steps: a step that is launched later reads what a load brings, and a store
    reads what the steps before it wrote, whatever later steps write.
    """

    def __init__(
        self,
        pages: RowCopier,
        states: StateCodec | None,
        host_states: HostRows,
        run: Callable[[Callable[[], None]], PendingCopy],
        close: Callable[[], None],
    ) -> None:
        """Args:
        pages: between device pages and host pages.
        states: of the engine.
        host_states: where states go.
        run: makes a copy of a state, in order with the engine's steps.
        close: waits until nothing is under way, and lets go of the host's memory.
        """
        self._pages = pages
        self._states = states
        self._host_states = host_states.memory
        self._run = run
        self._close = close

    def before_step(self, written_pages: IndexArray) -> None:
        """Keep the device pages that the next step may be the first to write to apart from stores that
        are under way."""
        self._pages.before_overwrite(written_pages)

    def load_pages(self, device_pages: IndexArray, host_pages: IndexArray) -> PendingCopy:
        return self._pages.load(device_pages, host_pages)

    def store_pages(self, device_pages: IndexArray, host_pages: IndexArray) -> PendingCopy:
        return self._pages.store(device_pages, host_pages)

    def load_state(self, slot: int, position: int, state: int) -> PendingCopy:
        codec, row = self._codec(), self._host_states[state]
        return self._run(lambda: codec.load_state(slot, position, row))

    def store_state(self, slot: int, position: int, state: int) -> PendingCopy:
        codec, row = self._codec(), self._host_states[state]
        return self._run(lambda: codec.store_state(slot, position, row))

    def close(self) -> None:
        self._close()

    def _codec(self) -> StateCodec:
        assert self._states is not None, "this model keeps no states"
        return self._states
