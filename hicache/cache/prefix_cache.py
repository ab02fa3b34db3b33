"""One rank's prefix cache: what a prompt may load, what a finished prefill stores.

No byte is copied here. A caller looks up, loads what the `Hit` names, and releases it; or begins one
of the `stores`, copies what the `StorePlan` names, and commits it when the last byte has arrived. In
between, host pages and states are pinned or belong to the plan, so nobody reads a row that is not whole
and nobody overwrites one that is read. Nothing here waits: what does not fit is skipped and counted.

A hit ends at a page border, leaves at least `replay_tokens` tokens to compute, and, for models with
states, ends where a state was stored.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Final

import msgspec

from hicache.cache.index import ABSENT, PinnedPrefix
from hicache.cache.outcomes import Hit, Miss, MissReason
from hicache.cache.pool_content import PoolContent
from hicache.cache.stats import CacheCounts, CacheStats
from hicache.cache.stores import PrefixLimits, Stores
from hicache.copies.runs import IndexArray
from hicache.keys import PromptKeys, prompt_keys
from hicache.pool.host_pool import HostPool
from transport.framing import TokenArray
from transport.messages.cache_report import PrefixMiss, PrefixUse

_KEPT_MISSES: Final = 10


class PrefixCache:
    """The cache over one host pool. Not thread-safe: the worker's loop owns it."""

    def __init__(
        self,
        pool: HostPool,
        *,
        page_tokens: int,
        replay_tokens: int,
        max_pending_bytes: int,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Serve what the pool holds already.

        Args:
            pool: mapped; this object alone writes its headers from now on.
            page_tokens: tokens a page.
            replay_tokens: trailing prompt tokens that no hit may cover, at least 1.
            max_pending_bytes: while stores under way have this much to copy, others are skipped.
            clock: nanoseconds that go on from one process to the next.
        """
        self._geometry = pool.geometry
        self._has_states = pool.geometry.state_bytes > 0
        self._limits = PrefixLimits(page_tokens, replay_tokens)
        self._page_tokens = page_tokens
        self._content = PoolContent(pool, clock)
        self._counts = CacheCounts()
        self.stores = Stores(
            self._content, pool.geometry, self._counts, self._limits, max_pending_bytes
        )
        self._serials = count()
        self._hits: dict[int, Hit] = {}
        self._misses: deque[tuple[int, PrefixMiss]] = deque(maxlen=_KEPT_MISSES)
        """The last ones, with the stamp of each."""

    # ---- prompts ------------------------------------------------------------------------------

    @property
    def page_tokens(self) -> int:
        return self._page_tokens

    @property
    def has_states(self) -> bool:
        return self._has_states

    def keys(self, tokens: TokenArray, salt: str = "") -> PromptKeys:
        return prompt_keys(
            tokens,
            fingerprint=self._geometry.fingerprint,
            salt=salt,
            page_tokens=self._page_tokens,
        )

    def hit_keys(self, prompt: PromptKeys) -> tuple[bytes, ...]:
        return prompt.keys[: self._limits.hit_pages(prompt.num_tokens)]

    # ---- loading ------------------------------------------------------------------------------

    def lookup(self, prompt: PromptKeys, request_id: str = "") -> Hit | Miss:
        """Find the longest prefix that may be loaded, and keep it there until `release`.

        `request_id` is told to those who ask why it missed.
        """
        self._counts.lookups += 1
        self._counts.queried_tokens += prompt.num_tokens
        (pages, state), matched = self._find(prompt)
        num_tokens = len(pages) * self._page_tokens
        if num_tokens < matched:
            self._counts.capped_by_state += 1
            self._counts.capped_tokens += matched - num_tokens
            self._note_miss(request_id, prompt, num_tokens, matched, MissReason.NO_STATE)
        if num_tokens:
            return self._hit(PinnedPrefix(pages, state), num_tokens, matched)
        if matched:
            return self._miss(MissReason.NO_STATE, matched)
        if not self._limits.hit_pages(prompt.num_tokens):
            return self._miss(MissReason.TOO_SHORT, 0)
        self._note_miss(request_id, prompt, 0, 0, MissReason.NO_PREFIX)
        return self._miss(MissReason.NO_PREFIX, 0)

    def release(self, hit: Hit) -> None:
        """The hit's rows are not read any more.

        Raises:
            KeyError: it was released before.
        """
        del self._hits[hit.serial]
        self._content.unpin(hit.prefix)

    def findable_tokens(self, prompt: PromptKeys) -> int:
        """Tokens of the hit that a lookup would give now. Counts and keeps nothing."""
        return len(self._find(prompt)[0].pages) * self._page_tokens

    def _find(self, prompt: PromptKeys) -> tuple[PinnedPrefix, int]:
        pages = self._content.index.match(self.hit_keys(prompt))
        matched = len(pages) * self._page_tokens
        state = ABSENT
        if self._has_states:
            pages, state = self._snap_to_state(pages)
        return PinnedPrefix(pages, state), matched

    def _snap_to_state(self, pages: IndexArray) -> tuple[IndexArray, int]:
        index = self._content.index
        for end in range(len(pages), 0, -1):
            state = index.state(int(pages[end - 1]))
            if state != ABSENT:
                return pages[:end], state
        return pages[:0], ABSENT

    def _hit(self, prefix: PinnedPrefix, num_tokens: int, matched: int) -> Hit:
        hit = Hit(num_tokens, prefix, matched, next(self._serials))
        self._hits[hit.serial] = hit
        self._content.pin(prefix, self._content.next_stamp())
        self._content.index.count_hit(prefix.pages)
        self._counts.hits += 1
        self._counts.hit_tokens += num_tokens
        return hit

    def _miss(self, reason: MissReason, matched: int) -> Miss:
        self._counts.misses[reason] = self._counts.misses.get(reason, 0) + 1
        return Miss(reason, matched)

    def _note_miss(
        self, request_id: str, prompt: PromptKeys, hit: int, matched: int, reason: MissReason
    ) -> None:
        miss = PrefixMiss(
            seconds_ago=0.0,
            prompt_tokens=prompt.num_tokens,
            hit_tokens=hit,
            matched_tokens=matched,
            reason=reason,
            request_id=request_id,
        )
        self._misses.append((self._content.next_stamp(), miss))

    def flush(self) -> None:
        """Forget everything. Hits go on reading their rows; stores under way will not be served."""
        self._counts.flushes += 1
        self.stores.flush()
        self._content.flush()

    # ---- for people ---------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        content, oldest = self._content, self._content.index.oldest_use()
        self._counts.evicted_pages = content.evicted_pages
        self._counts.evicted_states = content.evicted_states
        return CacheStats(
            counts=msgspec.structs.replace(
                self._counts,
                misses=dict(self._counts.misses),
                skipped_stores=dict(self._counts.skipped_stores),
            ),
            num_pages=self._geometry.num_pages,
            pages_used=content.index.num_pages,
            pages_free=content.pages.num_free,
            pages_pinned=content.index.num_pinned_pages,
            num_states=self._geometry.num_states,
            states_used=content.index.num_states,
            states_free=content.states.num_free,
            pending_bytes=self.stores.pending_bytes,
            oldest_page_seconds=0.0 if oldest is None else content.seconds_since(oldest),
            recovered_pages=content.recovered_pages,
            recovered_states=content.recovered_states,
        )

    def top_prefixes(self, limit: int) -> list[PrefixUse]:
        index = self._content.index
        return [
            PrefixUse(
                tokens=(index.depth(page) + 1) * self._page_tokens,
                hits=index.hits(page),
                idle_seconds=self._content.seconds_since(index.last_use(page)),
                has_state=index.state(page) != ABSENT,
            )
            for page in index.most_used(limit)
        ]

    def recent_misses(self) -> list[PrefixMiss]:
        """Why the last misses missed, newest first; hits that a missing state cut short included, prompts
        too short for any hit left out: they would fill the list and tell nothing."""
        return [
            msgspec.structs.replace(miss, seconds_ago=self._content.seconds_since(stamp))
            for stamp, miss in reversed(self._misses)
        ]

    def check_integrity(self) -> None:
        self.stores.check_integrity([hit.prefix for hit in self._hits.values()])
