"""A worker's prefix cache as a whole: the mapped pool, the index over it, the copies, what it reports."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from hicache.cache.prefix_cache import PrefixCache
from hicache.copies.cache_copies import CacheCopies
from hicache.errors import HostPoolError
from hicache.layout import CacheLayout
from hicache.manager.prefills import Prefills
from hicache.manager.reuse import PrefixReuse
from hicache.manager.telemetry import PrefixTelemetry
from hicache.manager.transfers import PrefixTransfers
from hicache.pool.host_pool import HostPool, PoolGeometry
from hicache.pool.segment import check_segment
from transport.messages.cache_report import CacheContent
from transport.messages.control import CacheAction
from transport.telemetry.metrics import MetricSet

REPORT_SECONDS: Final = 0.5
"""Time between two looks at the whole cache for the metrics."""
MAX_PENDING_BYTES: Final = 2 << 30
SHOWN_PREFIXES: Final = 10

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PoolOrder:
    """The pool that a worker is to have: its segment and how much to keep in it."""

    fd: int
    page_bytes: int
    """For all pages together."""
    states: int


class HostPrefixCache:
    """One worker's cache manager over a host pool, which it owns. Made by `open_host_prefix_cache`."""

    def __init__(
        self,
        pool: HostPool,
        layout: CacheLayout,
        copies: CacheCopies,
        metrics: MetricSet,
        max_pending_bytes: int = MAX_PENDING_BYTES,
    ) -> None:
        self._pool = pool
        self.cache = PrefixCache(
            pool,
            page_tokens=layout.page_tokens,
            replay_tokens=layout.replay_tokens,
            max_pending_bytes=max_pending_bytes,
        )
        self.prefills = Prefills(self.cache)
        self.reuse = PrefixReuse(self.cache, self.prefills, layout.keep_tokens)
        """For the scheduler."""
        self.transfers = PrefixTransfers(self.cache, self.prefills, pool.geometry, copies)
        """For whoever launches steps."""
        self._telemetry = PrefixTelemetry(metrics, layout.page_tokens)
        self._report_due = 0.0

    def tick(self) -> bool:
        """Finish the copies that have arrived; now and then, bring the metrics up to date. Whether a
        copy has arrived."""
        has_arrived = self.transfers.poll()
        now = time.monotonic()
        if now >= self._report_due:
            self._report_due = now + REPORT_SECONDS
            self._telemetry.update(self.cache.stats(), self.transfers.counts)
        return has_arrived

    def carry_out(self, action: CacheAction) -> CacheContent:
        stats = self.cache.stats()
        content = CacheContent(
            enabled=True,
            pages_used=stats.pages_used,
            pages_total=stats.num_pages,
            states_used=stats.states_used,
            states_total=stats.num_states,
            pool_bytes=self._pool.geometry.total_bytes,
            oldest_page_seconds=stats.oldest_page_seconds,
            top_prefixes=self.cache.top_prefixes(SHOWN_PREFIXES),
            recent_misses=self.cache.recent_misses(),
        )
        if action == "flush":
            self.cache.flush()
        return content

    def close(self) -> None:
        """Unmap the pool; what it holds stays. The engine is closed already."""
        self.transfers.close()
        try:
            self._pool.close()
        except BufferError:
            # So it is when the traceback of what ends this process still holds rows: that is the error
            # to show. The mapping goes with the process.
            log.debug("the host pool stays mapped until this process ends")

    def check_integrity(self) -> None:
        self.cache.check_integrity()


def pool_geometry(order: PoolOrder, layout: CacheLayout, available: int) -> PoolGeometry:
    """The pool that `order` gives for `layout`; asked as early as the layout is known, since loading the
    weights takes long. Its fingerprint need not be final yet.

    Args:
        order: what is wanted.
        layout: of the engine.
        available: bytes of host memory that can still be had.

    Raises:
        HostPoolError: the pool cannot be had, or the model's prefixes cannot be reused as it is run.
    """
    if layout.state_bytes and not layout.keep_tokens:
        raise HostPoolError(
            "The prefix cache needs this model's bounded replay, which --yoco-keep-tokens 0 turns "
            "off: set it to 140, or turn the cache off with --hicache-size-gb 0."
        )
    geometry = PoolGeometry.from_budget(
        layout.fingerprint,
        order.page_bytes,
        layout.page_bytes,
        layout.stored_state_bytes,
        order.states,
    )
    check_segment(order.fd, geometry.total_bytes, available)
    return geometry


def open_host_prefix_cache(
    order: PoolOrder,
    layout: CacheLayout,
    available: int,
    copies: Callable[[HostPool], CacheCopies],
    metrics: MetricSet,
) -> HostPrefixCache:
    """Map this rank's pool and serve what a former worker left in it.

    Args:
        order, layout, available: as for `pool_geometry`.
        copies: makes the copies between the engine and the pool.
        metrics: of the worker.

    Raises:
        HostPoolError: the pool cannot be had; `copies` may raise more.
    """
    pool = HostPool(order.fd, pool_geometry(order, layout, available), available)
    return HostPrefixCache(pool, layout, copies(pool), metrics)
