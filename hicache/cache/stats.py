"""What the prefix cache counts, and how full it is."""

from __future__ import annotations

import msgspec

from hicache.cache.outcomes import MissReason, SkipReason


class CacheCounts(msgspec.Struct):
    """Totals since the start of this process."""

    lookups: int = 0
    hits: int = 0
    queried_tokens: int = 0
    """Prompt tokens of all lookups."""
    hit_tokens: int = 0
    capped_by_state: int = 0
    """Lookups, hit or not, that found pages past the last usable state."""
    capped_tokens: int = 0
    """Tokens of those pages."""
    stored_pages: int = 0
    stored_states: int = 0
    evicted_pages: int = 0
    evicted_states: int = 0
    """Those that went with their page included."""
    flushes: int = 0
    misses: dict[MissReason, int] = msgspec.field(default_factory=dict)
    """Lookups by reason."""
    skipped_stores: dict[SkipReason, int] = msgspec.field(default_factory=dict)
    """Prompts of which something was not stored, by reason."""


class CacheStats(msgspec.Struct, frozen=True):
    """The cache at one moment."""

    counts: CacheCounts
    num_pages: int
    pages_used: int
    """Found by lookups; pages under way are in neither this nor `pages_free`."""
    pages_free: int
    pages_pinned: int
    num_states: int
    states_used: int
    states_free: int
    pending_bytes: int
    """Of stores under way."""
    oldest_page_seconds: float
    """Time since the last use of the page that was not used for longest; 0: the pool is empty."""
    recovered_pages: int
    """Pages that an earlier process left in the pool."""
    recovered_states: int
