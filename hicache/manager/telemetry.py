"""Gauges and counters of one rank's prefix cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.cache.outcomes import MissReason, SkipReason
from hicache.copies.row_copy import LINK_DIRECTION
from transport.telemetry import catalog

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache.cache.stats import CacheStats
    from hicache.copies.row_copy import Direction
    from hicache.manager.transfers import TransferCounts
    from transport.telemetry.metrics import MetricSet


class PrefixTelemetry:
    """Copies what cache and transfers count into the worker's metrics."""

    def __init__(self, metrics: MetricSet, page_tokens: int) -> None:
        self._metrics = metrics
        self._page_tokens = page_tokens
        # All of them from the start: a rate over a counter that appears with its first event misses it.
        for missed in MissReason:
            metrics.counter(catalog.HICACHE_MISSES, missed.value)
        for skipped in SkipReason:
            metrics.counter(catalog.HICACHE_SKIPPED_STORES, skipped.value)
        for label in LINK_DIRECTION.values():
            metrics.counter(catalog.HICACHE_COPIED_BYTES, label)
            metrics.counter(catalog.HICACHE_COPY_SECONDS, label)

    def update(self, stats: CacheStats, copies: Mapping[Direction, TransferCounts]) -> None:
        self._update_gauges(stats)
        counter, counts = self._metrics.counter, stats.counts
        counter(catalog.PREFIX_CACHE_QUERIES).set_total(counts.queried_tokens)
        counter(catalog.PREFIX_CACHE_HITS).set_total(counts.hit_tokens)
        counter(catalog.HICACHE_LOOKUPS).set_total(counts.lookups)
        counter(catalog.HICACHE_HITS).set_total(counts.hits)
        counter(catalog.HICACHE_CAPPED_BY_STATE).set_total(counts.capped_by_state)
        counter(catalog.HICACHE_CAPPED_TOKENS).set_total(counts.capped_tokens)
        counter(catalog.HICACHE_STORED_PAGES).set_total(counts.stored_pages)
        counter(catalog.HICACHE_STORED_STATES).set_total(counts.stored_states)
        counter(catalog.HICACHE_EVICTED_PAGES).set_total(counts.evicted_pages)
        counter(catalog.HICACHE_EVICTED_STATES).set_total(counts.evicted_states)
        counter(catalog.HICACHE_FLUSHES).set_total(counts.flushes)
        for missed, times in counts.misses.items():
            counter(catalog.HICACHE_MISSES, missed.value).set_total(times)
        for skipped, times in counts.skipped_stores.items():
            counter(catalog.HICACHE_SKIPPED_STORES, skipped.value).set_total(times)
        for direction, copied in copies.items():
            label = LINK_DIRECTION[direction]
            counter(catalog.HICACHE_COPIED_BYTES, label).set_total(copied.num_bytes)
            counter(catalog.HICACHE_COPY_SECONDS, label).set_total(copied.seconds)

    def _update_gauges(self, stats: CacheStats) -> None:
        gauge = self._metrics.gauge
        gauge(catalog.HICACHE_PAGES).set(stats.num_pages)
        gauge(catalog.HICACHE_PAGES_USED).set(stats.pages_used)
        gauge(catalog.HICACHE_STATES).set(stats.num_states)
        gauge(catalog.HICACHE_STATES_USED).set(stats.states_used)
        gauge(catalog.HICACHE_HOST_TOTAL_TOKENS).set(stats.num_pages * self._page_tokens)
        gauge(catalog.HICACHE_HOST_USED_TOKENS).set(stats.pages_used * self._page_tokens)
        gauge(catalog.HICACHE_PENDING_BYTES).set(stats.pending_bytes)
        gauge(catalog.HICACHE_OLDEST_PAGE_SECONDS).set(stats.oldest_page_seconds)
        gauge(catalog.HICACHE_RECOVERED_PAGES).set(stats.recovered_pages)
