"""One rank's prefix cache: what a prompt may load, what a finished prefill stores.

No byte is copied here. A caller looks up, loads what the `Hit` names, and releases it; or begins a
store, copies what the `StorePlan` names, and commits it when the last byte has arrived. In between,
host pages and states are pinned or belong to the plan, so nobody reads a row that is not whole and
nobody overwrites one that is read. Nothing here waits: what does not fit is skipped and counted.

A hit ends at a page border, leaves at least `replay_tokens` tokens to compute, and, for models with
states, ends where a state was stored.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Final

import msgspec

from hicache.cache.index import ABSENT, PinnedPrefix
from hicache.cache.outcomes import Hit, Miss, MissReason, StorePlan
from hicache.cache.pool_content import PoolContent
from hicache.cache.stats import CacheCounts, CacheStats
from hicache.cache.stores import Stores
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
        self._page_tokens = page_tokens
        self._replay_tokens = replay_tokens
        self._content = PoolContent(pool, clock)
        self._counts = CacheCounts()
        self._stores = Stores(
            self._content,
            pool.geometry,
            self._counts,
            page_tokens=page_tokens,
            max_pending_bytes=max_pending_bytes,
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

    def anchors(self, num_tokens: int) -> tuple[int, ...]:
        """Where a prefill of `num_tokens` tokens should leave states, longest first; none for models
        without states.

        The first serves a longer next turn, the second the same prompt again.
        """
        if not self._has_states:
            return ()
        ends = (num_tokens // self._page_tokens, self._most_pages(num_tokens))
        return tuple(end * self._page_tokens for end in dict.fromkeys(ends) if end)

    def hit_keys(self, prompt: PromptKeys) -> tuple[bytes, ...]:
        return prompt.keys[: self._most_pages(prompt.num_tokens)]

    def _most_pages(self, num_tokens: int) -> int:
        return max(0, num_tokens - self._replay_tokens) // self._page_tokens

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
        if not self._most_pages(prompt.num_tokens):
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

    # ---- storing ------------------------------------------------------------------------------

    def begin_store(
        self, prompt: PromptKeys, anchors: Sequence[int] | None = None
    ) -> StorePlan | None:
        """Say which rows of a finished prefill to copy, and where to.

        Pages that are there, or that another plan is storing, are left out.

        Args:
            prompt: the computed prompt.
            anchors: positions, at page borders, whose state the engine still has; by default
                `self.anchors`. Pages past the longest of them are not stored: nothing could hit them.

        Returns:
            None: there is nothing to copy, or it was skipped (see `CacheCounts.skipped_stores`).

        Raises:
            ValueError: an anchor is not at a page border of the prompt.
        """
        ends = self._anchor_pages(prompt, anchors)
        keys = prompt.keys[: ends[0] if ends else 0] if self._has_states else prompt.keys
        return self._stores.begin(keys, ends)

    def _anchor_pages(self, prompt: PromptKeys, anchors: Sequence[int] | None) -> list[int]:
        if not self._has_states:
            return []
        wanted = self.anchors(prompt.num_tokens) if anchors is None else anchors
        for at in wanted:
            if at % self._page_tokens or not 0 <= at <= prompt.num_tokens:
                raise ValueError(
                    f"A state cannot be kept at token {at} of {prompt.num_tokens}: it belongs to a "
                    f"multiple of {self._page_tokens} within the prompt."
                )
        return sorted({at // self._page_tokens for at in wanted} - {0}, reverse=True)

    def commit(self, plan: StorePlan) -> None:
        """All rows of the plan have arrived: serve them.

        Raises:
            KeyError: the plan was committed or abandoned before.
        """
        self._stores.commit(plan)

    def abandon(self, plan: StorePlan) -> None:
        """The copy failed, and nothing writes to the plan's rows any more.

        Raises:
            KeyError: the plan was committed or abandoned before.
        """
        self._stores.abandon(plan)

    def flush(self) -> None:
        """Forget everything. Hits go on reading their rows; stores under way will not be served."""
        self._counts.flushes += 1
        self._stores.flush()
        self._content.flush()

    def resume_keys(self, prompt: PromptKeys, anchors: Sequence[int] | None = None) -> list[bytes]:
        """Where a hit can end once this prompt is stored with these anchors: keys of those pages."""
        if not self._has_states:
            return list(prompt.keys)
        return [prompt.keys[end - 1] for end in self._anchor_pages(prompt, anchors)]

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
            pending_bytes=self._stores.pending_bytes,
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
        self._stores.check_integrity([hit.prefix for hit in self._hits.values()])
