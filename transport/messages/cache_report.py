"""What a worker tells about its host prefix cache when asked: the answer to a `CacheCommand`."""

from __future__ import annotations

import msgspec


class PrefixUse(msgspec.Struct, frozen=True):
    """One cached prefix that was used again."""

    tokens: int
    hits: int
    """Prompts that went on from here."""
    idle_seconds: float
    """Since its last use."""
    has_state: bool


class PrefixMiss(msgspec.Struct, frozen=True):
    """Why one prompt was not, or not wholly, taken from the cache."""

    seconds_ago: float
    prompt_tokens: int
    hit_tokens: int
    matched_tokens: int
    """Tokens whose pages were there; more than `hit_tokens` where a state was missing."""
    reason: str
    request_id: str


class CacheContent(msgspec.Struct, frozen=True):
    """One rank's host prefix cache. With the command `flush`: what it held before."""

    enabled: bool
    pages_used: int = 0
    pages_total: int = 0
    states_used: int = 0
    states_total: int = 0
    pool_bytes: int = 0
    oldest_page_seconds: float = 0.0
    """Since the last use of the page that was left alone for longest."""
    top_prefixes: list[PrefixUse] = []
    """By length times hits."""
    recent_misses: list[PrefixMiss] = []
    """The newest first."""
