"""Copies between an engine and its host pool: what plans ask for, started in order, finished whenever.

A hit is released and a store committed when its last byte has arrived, which is looked for at every
turn of the worker's loop, also of an idle one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from hicache.host_pool import HostPool
from hicache.outcomes import Hit
from hicache.prefix_cache import PrefixCache
from hicache.row_copy import PendingCopy
from workers.engine import CacheCopies, PrefixLoad, PrefixStore

Direction = Literal["up", "down"]
DIRECTIONS: Final[tuple[Direction, ...]] = ("up", "down")


@dataclass
class TransferCounts:
    """Totals of one direction since the start."""

    num_bytes: int = 0
    seconds: float = 0.0
    """Sum over all transfers of the time from start to arrival."""


@dataclass(frozen=True)
class _Transfer:
    subject: Hit | PrefixStore
    copies: tuple[PendingCopy, ...]
    num_bytes: int
    started: float


class PrefixTransfers:
    """Owner of the transfers under way between one engine and one host pool."""

    def __init__(self, cache: PrefixCache, pool: HostPool, copies: CacheCopies) -> None:
        self._cache = cache
        self._geometry = pool.geometry
        self._copies: CacheCopies | None = copies
        self._open: deque[_Transfer] = deque()
        self.counts = {direction: TransferCounts() for direction in DIRECTIONS}

    @property
    def num_open(self) -> int:
        """Transfers that have not arrived."""
        return len(self._open)

    def close(self) -> None:
        """Let go of the rows. The engine is closed already: nothing is under way any more."""
        self._open.clear()
        self._copies = None

    def load(self, loads: Iterable[PrefixLoad]) -> None:
        """Start the copies that a plan needs before it is launched."""
        assert self._copies is not None
        for slot, pages, hit in loads:
            started = time.monotonic()
            copies = [self._copies.load_pages(np.asarray(pages, np.int32), hit.page_slots)]
            num_bytes = len(pages) * self._geometry.page_bytes
            if hit.state_slot is not None:
                copies.append(self._copies.load_state(slot, hit.num_tokens, hit.state_slot))
                num_bytes += self._geometry.state_bytes
            self._open.append(_Transfer(hit, tuple(copies), num_bytes, started))
        self.poll()  # on a CPU, they are over

    def store(self, stores: Iterable[PrefixStore]) -> None:
        """Start the copies of what the launched plan computes."""
        assert self._copies is not None
        for store in stores:
            slot, pages, plan, _ = store
            started = time.monotonic()
            table = np.asarray(pages, np.int32)
            copies = [self._copies.store_pages(table[plan.page_indexes], plan.page_slots)]
            copies += [
                self._copies.store_state(slot, state.position, state.slot) for state in plan.states
            ]
            self._open.append(_Transfer(store, tuple(copies), plan.num_bytes, started))
        self.poll()

    def poll(self) -> bool:
        """Finish what has arrived, in the order in which it was started. Whether anything has: a
        sequence may have waited for it."""
        before = len(self._open)
        while self._open and all(copy.done() for copy in self._open[0].copies):
            transfer = self._open.popleft()
            match transfer.subject:
                case Hit() as hit:
                    self._cache.release(hit)
                    self._count("up", transfer)
                case PrefixStore(plan=plan, announcement=announcement):
                    self._cache.commit(plan)
                    self._cache.withdraw(announcement)
                    self._count("down", transfer)
        return len(self._open) < before

    def _count(self, direction: Direction, transfer: _Transfer) -> None:
        counts = self.counts[direction]
        counts.num_bytes += transfer.num_bytes
        counts.seconds += time.monotonic() - transfer.started
