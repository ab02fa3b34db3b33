"""A worker's prefix cache as a whole: the mapped pool, the index over it, the copies, what it reports."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Final

from hicache.cache.prefix_cache import PrefixCache
from hicache.copies.copy_choice import CopyChoice
from hicache.copies.open import open_cache_copies
from hicache.errors import HostPoolError
from hicache.pool.host_pool import HostPool, PoolGeometry
from hicache.pool.segment import check_segment
from transport.messages.cache_report import CacheContent, PrefixMiss, PrefixUse
from transport.messages.control import CacheAction
from transport.telemetry.metrics import MetricSet
from workers.contract import CacheLayout, Engine, ModelLoadError
from workers.engine.host_memory import available_host_memory
from workers.prefix_reuse import PrefixReuse
from workers.prefix_telemetry import PrefixTelemetry
from workers.prefix_transfer import PrefixTransfers

REPORT_SECONDS: Final = 0.5
"""Time between two looks at the whole cache for the metrics."""
MAX_PENDING_BYTES: Final = 2 << 30
SHOWN_PREFIXES: Final = 10
SHOWN_MISSES: Final = 10

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PoolOrder:
    """The pool that a worker is to have: its segment and how much to keep in it."""

    fd: int
    page_bytes: int
    """For all pages together."""
    states: int
    copy: CopyChoice
    """How pages travel to and from a GPU."""


class PrefixStorage:
    """Owner of the mapped pool. Made by `open_prefix_storage`."""

    def __init__(
        self,
        pool: HostPool,
        cache: PrefixCache,
        transfers: PrefixTransfers,
        layout: CacheLayout,
        metrics: MetricSet,
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._telemetry = PrefixTelemetry(metrics, layout.page_tokens)
        self._report_due = 0.0
        self.transfers = transfers
        self.reuse = PrefixReuse(cache, layout.keep_tokens)
        """For the scheduler."""

    def tick(self) -> bool:
        """Finish the copies that have arrived; now and then, bring the metrics up to date. Whether a
        copy has arrived."""
        has_arrived = self.transfers.poll()
        now = time.monotonic()
        if now >= self._report_due:
            self._report_due = now + REPORT_SECONDS
            self._telemetry.update(self._cache.stats(), self.transfers.counts)
        return has_arrived

    def carry_out(self, action: CacheAction) -> CacheContent:
        """What the cache holds; with `flush`, it is emptied then."""
        stats = self._cache.stats()
        content = CacheContent(
            enabled=True,
            pages_used=stats.pages_used,
            pages_total=stats.num_pages,
            states_used=stats.states_used,
            states_total=stats.num_states,
            pool_bytes=self._pool.geometry.total_bytes,
            oldest_page_seconds=stats.oldest_page_seconds,
            top_prefixes=[
                PrefixUse(use.num_tokens, use.hits, use.idle_seconds, use.has_state)
                for use in self._cache.top_prefixes(SHOWN_PREFIXES)
            ],
            recent_misses=[
                PrefixMiss(
                    miss.seconds_ago,
                    miss.prompt_tokens,
                    miss.hit_tokens,
                    miss.matched_tokens,
                    miss.reason,
                    miss.request_id,
                )
                for miss in self._cache.recent_misses()[:SHOWN_MISSES]
            ],
        )
        if action == "flush":
            self._cache.flush()
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
        """Verify the whole cache.

        Raises:
            AssertionError: something is wrong.
        """
        self._cache.check_integrity()


def check_prefix_storage(order: PoolOrder, layout: CacheLayout) -> PoolGeometry:
    """The pool that `order` gives for `layout`; told as early as the layout is known, since loading the
    weights takes long. Its fingerprint need not be final yet.

    Raises:
        ModelLoadError: the pool cannot be had, or the model's prefixes cannot be reused as it is run.
    """
    if layout.state_bytes and not layout.keep_tokens:
        raise ModelLoadError(
            "The prefix cache needs this model's bounded replay, which --yoco-keep-tokens 0 turns "
            "off: set it to 140, or turn the cache off with --hicache-size-gb 0."
        )
    try:
        geometry = PoolGeometry.from_budget(
            layout.fingerprint,
            order.page_bytes,
            layout.page_bytes,
            layout.stored_state_bytes,
            order.states,
        )
        check_segment(order.fd, geometry.total_bytes, available_host_memory())
    except HostPoolError as error:
        raise ModelLoadError(str(error)) from error
    return geometry


def open_prefix_storage(order: PoolOrder, engine: Engine, metrics: MetricSet) -> PrefixStorage:
    """Map this rank's pool and serve what a former worker left in it.

    Raises:
        ModelLoadError: see `check_prefix_storage`.
    """
    layout = engine.info.layout
    geometry = check_prefix_storage(order, layout)
    try:
        pool = HostPool(order.fd, geometry, available_host_memory())
        copies = open_cache_copies(
            engine.device_cache(), pool.memory, pool.pages, pool.states, order.copy
        )
    except HostPoolError as error:
        raise ModelLoadError(str(error)) from error
    cache = PrefixCache(
        pool,
        page_tokens=layout.page_tokens,
        replay_tokens=layout.replay_tokens,
        max_pending_bytes=MAX_PENDING_BYTES,
    )
    transfers = PrefixTransfers(cache, pool, copies)
    return PrefixStorage(pool, cache, transfers, layout, metrics)
