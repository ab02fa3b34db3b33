"""Copies between an engine and its host pool: what plans ask for, started in order, finished whenever.

A hit is released and a store committed when its last byte has arrived, which is looked for at every
turn of the worker's loop, also of an idle one.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from hicache.cache.index import ABSENT
from hicache.cache.outcomes import Hit
from hicache.cache.prefix_cache import PrefixCache
from hicache.copies.cache_copies import CacheCopies
from hicache.copies.row_copy import LINK_DIRECTION, Direction, PendingCopy
from hicache.copies.runs import IndexArray
from hicache.errors import HostPoolError, PrefixLoadError
from hicache.manager.prefills import Prefills
from hicache.manager.step_copies import PrefixLoad, PrefixStore
from hicache.pool.host_pool import PoolGeometry

log = logging.getLogger(__name__)


@dataclass
class TransferCounts:
    """Totals of one direction since the start."""

    num_bytes: int = 0
    seconds: float = 0.0
    """Sum of the times that copies took, without what they waited for before."""


@dataclass(frozen=True)
class _Transfer:
    subject: Hit | PrefixStore
    copies: tuple[PendingCopy, ...]
    num_bytes: int
    is_whole: bool = True
    """Whether all of its copies could be started."""


class PrefixTransfers:
    """Owner of the transfers under way between one engine and one host pool."""

    def __init__(
        self,
        cache: PrefixCache,
        prefills: Prefills,
        geometry: PoolGeometry,
        copies: CacheCopies,
    ) -> None:
        self._cache = cache
        self._prefills = prefills
        self._geometry = geometry
        self._copies: CacheCopies | None = copies
        self._open: deque[_Transfer] = deque()
        self._has_failed = False
        self.counts = {direction: TransferCounts() for direction in LINK_DIRECTION}

    @property
    def num_open(self) -> int:
        return len(self._open)

    def close(self) -> None:
        """Let go of the rows. No step is launched any more."""
        self._open.clear()
        if self._copies is not None:
            self._copies.close()
            self._copies = None

    def load(self, loads: Iterable[PrefixLoad], written_pages: Callable[[], IndexArray]) -> None:
        """Start the copies that a plan needs before it is launched, and keep the device pages that it will
        write to apart from stores that are under way.

        Raises:
            PrefixLoadError: the device refuses. The cache is empty now.
        """
        assert self._copies is not None
        for load in loads:
            num_bytes = len(load.pages) * self._geometry.page_bytes
            if load.hit.host_state != ABSENT:
                num_bytes += self._geometry.state_bytes
            try:
                copies = tuple(_start_load(self._copies, load))
            except HostPoolError as error:
                # The worker that comes next serves what the pool holds: it must not fail on the same
                # prefix, so that its request is not lost.
                self._cache.flush()
                raise PrefixLoadError(f"A cached prefix cannot be loaded: {error}") from error
            self._open.append(_Transfer(load.hit, copies, num_bytes))
        if self._open:  # only then can a store be under way
            self._copies.before_step(written_pages())
        self.poll()  # on a CPU, they are over

    def store(self, stores: Iterable[PrefixStore]) -> None:
        """Start the copies of what the launched plan computes. What the device refuses is skipped and
        counted."""
        assert self._copies is not None
        for store in stores:
            copies: list[PendingCopy] = []
            is_whole = True
            try:
                copies.extend(_start_store(self._copies, store))
            except HostPoolError as error:
                is_whole = False
                self._prefills.close(store.announcement)
                self._report(error)
            num_bytes = store.plan.num_bytes
            self._open.append(_Transfer(store, tuple(copies), num_bytes, is_whole))
        self.poll()

    def _report(self, error: HostPoolError) -> None:
        # What fails once mostly fails again, with every prompt.
        if not self._has_failed:
            self._has_failed = True
            log.error(
                "A prompt cannot be stored in the prefix cache; it is served without. Further "
                "failures are counted in hicache_skipped_stores_total only. %s",
                error,
            )

    def poll(self) -> bool:
        """Finish what has arrived, in the order in which it was started. Whether anything has: a
        sequence may have waited for it."""
        before = len(self._open)
        while self._open and all(copy.done() for copy in self._open[0].copies):
            transfer = self._open.popleft()
            match transfer.subject:
                case Hit() as hit:
                    self._cache.release(hit)
                    self._count("load", transfer)
                case PrefixStore(plan=plan) if not transfer.is_whole:
                    self._cache.stores.abandon(plan)
                case PrefixStore(plan=plan, announcement=announcement):
                    self._cache.stores.commit(plan)
                    self._prefills.close(announcement)
                    self._count("store", transfer)
        return len(self._open) < before

    def _count(self, direction: Direction, transfer: _Transfer) -> None:
        counts = self.counts[direction]
        counts.num_bytes += transfer.num_bytes
        counts.seconds += sum(copy.seconds() for copy in transfer.copies)


def _start_load(copies: CacheCopies, load: PrefixLoad) -> Iterator[PendingCopy]:
    slot, pages, hit = load
    yield copies.load_pages(np.asarray(pages, np.int32), hit.host_pages)
    if hit.host_state != ABSENT:
        yield copies.load_state(slot, hit.num_tokens, hit.host_state)


def _start_store(copies: CacheCopies, store: PrefixStore) -> Iterator[PendingCopy]:
    """The copies as they are started: whoever takes them has those before one that fails."""
    slot, pages, plan, _ = store
    table = np.asarray(pages, np.int32)
    yield copies.store_pages(table[plan.blocks], plan.host_pages)
    for state in plan.states:
        yield copies.store_state(slot, state.position, state.host_state)
