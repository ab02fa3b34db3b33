"""Gauges and counters of one rank's prefix cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.cache.outcomes import MissReason, SkipReason
from hicache.copies.row_copy import LINK_DIRECTION

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache.cache.stats import CacheStats
    from hicache.copies.row_copy import Direction
    from hicache.manager.transfers import TransferCounts
    from transport.telemetry.metrics import MetricSet


class PrefixTelemetry:
    """Copies what cache and transfers count into the worker's metrics."""

    def __init__(self, metrics: MetricSet, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._pages = metrics.gauge("hicache_pages")
        self._pages_used = metrics.gauge("hicache_pages_used")
        self._states = metrics.gauge("hicache_states")
        self._states_used = metrics.gauge("hicache_states_used")
        self._total_tokens = metrics.gauge("hicache_host_total_tokens")
        self._used_tokens = metrics.gauge("hicache_host_used_tokens")
        self._pending_bytes = metrics.gauge("hicache_pending_bytes")
        self._oldest_page = metrics.gauge("hicache_oldest_page_seconds")
        self._recovered_pages = metrics.gauge("hicache_recovered_pages")
        self._queried_tokens = metrics.counter("prefix_cache_queries")
        self._hit_tokens = metrics.counter("prefix_cache_hits")
        self._lookups = metrics.counter("hicache_lookups")
        self._hits = metrics.counter("hicache_hits")
        self._capped = metrics.counter("hicache_capped_by_state")
        self._capped_tokens = metrics.counter("hicache_capped_tokens")
        self._stored_pages = metrics.counter("hicache_stored_pages")
        self._stored_states = metrics.counter("hicache_stored_states")
        self._evicted_pages = metrics.counter("hicache_evicted_pages")
        self._evicted_states = metrics.counter("hicache_evicted_states")
        self._flushes = metrics.counter("hicache_flushes")
        # All of them from the start: a rate over a counter that appears with its first event misses it.
        self._misses = {
            reason: metrics.counter("hicache_misses", reason.value) for reason in MissReason
        }
        self._skipped_stores = {
            reason: metrics.counter("hicache_skipped_stores", reason.value) for reason in SkipReason
        }
        self._copied_bytes = {
            direction: metrics.counter("hicache_copied_bytes", label)
            for direction, label in LINK_DIRECTION.items()
        }
        self._copy_seconds = {
            direction: metrics.counter("hicache_copy_seconds", label)
            for direction, label in LINK_DIRECTION.items()
        }

    def update(self, stats: CacheStats, copies: Mapping[Direction, TransferCounts]) -> None:
        self._update_gauges(stats)
        counts = stats.counts
        self._queried_tokens.value = counts.queried_tokens
        self._hit_tokens.value = counts.hit_tokens
        self._lookups.value = counts.lookups
        self._hits.value = counts.hits
        self._capped.value = counts.capped_by_state
        self._capped_tokens.value = counts.capped_tokens
        self._stored_pages.value = counts.stored_pages
        self._stored_states.value = counts.stored_states
        self._evicted_pages.value = counts.evicted_pages
        self._evicted_states.value = counts.evicted_states
        self._flushes.value = counts.flushes
        for missed, times in counts.misses.items():
            self._misses[missed].value = times
        for skipped, times in counts.skipped_stores.items():
            self._skipped_stores[skipped].value = times
        for direction, copied in copies.items():
            self._copied_bytes[direction].value = copied.num_bytes
            self._copy_seconds[direction].value = copied.seconds

    def _update_gauges(self, stats: CacheStats) -> None:
        self._pages.set(stats.num_pages)
        self._pages_used.set(stats.pages_used)
        self._states.set(stats.num_states)
        self._states_used.set(stats.states_used)
        self._total_tokens.set(stats.num_pages * self._page_tokens)
        self._used_tokens.set(stats.pages_used * self._page_tokens)
        self._pending_bytes.set(stats.pending_bytes)
        self._oldest_page.set(stats.oldest_page_seconds)
        self._recovered_pages.set(stats.recovered_pages)
