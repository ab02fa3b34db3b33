"""Stores under way: which pages and states of a finished prefill go where, and what becomes of them.

A prefix is served only when all of it is whole. So a store leaves out the pages that are there or that
another store is copying, and what it copied is dropped if the pages before it did not come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np

from hicache.cache.index import ABSENT, PinnedPrefix
from hicache.cache.outcomes import AnchorState, SkipReason, StorePlan
from hicache.cache.pool_content import PoolContent
from hicache.cache.stats import CacheCounts
from hicache.copies.runs import IndexArray
from hicache.keys import PromptKeys
from hicache.pool.host_pool import PoolGeometry


@dataclass(frozen=True)
class PrefixLimits:
    """Where prefixes of a prompt may end."""

    page_tokens: int
    replay_tokens: int
    """Trailing tokens of a prompt that no hit may cover."""

    def hit_pages(self, num_tokens: int) -> int:
        """Pages of the longest hit of a prompt."""
        return max(0, num_tokens - self.replay_tokens) // self.page_tokens


class _Rows(NamedTuple):
    """What to store of a prompt."""

    blocks: list[int]
    """Which pages of the prompt."""
    ends: list[int]
    """Pages before each state, most first."""


_NOTHING = _Rows([], [])


class Stores:
    """The plans of one cache. Not thread-safe."""

    def __init__(
        self,
        content: PoolContent,
        geometry: PoolGeometry,
        counts: CacheCounts,
        limits: PrefixLimits,
        max_pending_bytes: int,
    ) -> None:
        self._content = content
        self._geometry = geometry
        self._has_states = geometry.state_bytes > 0
        self._counts = counts
        self._limits = limits
        self._page_tokens = limits.page_tokens
        self._max_pending_bytes = max_pending_bytes
        self._serials = count()
        self._plans: dict[int, StorePlan] = {}
        self._pending_bytes = 0
        # What the plans will add, unless they were flushed meanwhile.
        self._storing_pages: set[bytes] = set()
        self._storing_states: set[bytes] = set()
        self._flushed_plans: set[int] = set()

    @property
    def pending_bytes(self) -> int:
        return self._pending_bytes

    def anchors(self, num_tokens: int) -> tuple[int, ...]:
        """Where a prefill of `num_tokens` tokens should leave states, longest first; none for models
        without states.

        The first serves a longer next turn, the second the same prompt again.
        """
        if not self._has_states:
            return ()
        ends = (num_tokens // self._page_tokens, self._limits.hit_pages(num_tokens))
        return tuple(end * self._page_tokens for end in dict.fromkeys(ends) if end)

    def resume_keys(self, prompt: PromptKeys, anchors: Sequence[int] | None = None) -> list[bytes]:
        """Where a hit can end once this prompt is stored with these anchors: keys of those pages."""
        if not self._has_states:
            return list(prompt.keys)
        return [prompt.keys[end - 1] for end in self._anchor_pages(prompt, anchors)]

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

    def begin(self, prompt: PromptKeys, anchors: Sequence[int] | None = None) -> StorePlan | None:
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
        stamp = self._content.next_stamp()
        prefix = PinnedPrefix(self._content.index.match(keys), ABSENT)
        self._content.pin(prefix, stamp)
        rows = self._choose(keys, ends, len(prefix.pages))
        num_bytes = (
            len(rows.blocks) * self._geometry.page_bytes
            + len(rows.ends) * self._geometry.state_bytes
        )
        # A prompt larger than the limit may go, alone.
        if self._plans and self._pending_bytes + num_bytes > self._max_pending_bytes:
            self._skip(SkipReason.PENDING)
            rows = _NOTHING
        if rows == _NOTHING:
            self._content.unpin(prefix)
            return None
        host_pages = self._content.take_pages(len(rows.blocks))
        host_states = self._content.take_states(len(rows.ends)).tolist()
        plan = StorePlan(
            blocks=np.array(rows.blocks, np.int32),
            host_pages=host_pages,
            states=tuple(
                AnchorState(end * self._page_tokens, state)
                for end, state in zip(rows.ends, host_states, strict=True)
            ),
            num_bytes=num_bytes,
            keys=keys,
            prefix=prefix,
            stamp=stamp,
            serial=next(self._serials),
        )
        self._plans[plan.serial] = plan
        self._pending_bytes += plan.num_bytes
        self._storing_pages.update(_page_keys(plan))
        self._storing_states.update(self._state_keys(plan))
        return plan

    def _choose(self, keys: tuple[bytes, ...], ends: list[int], stored: int) -> _Rows:
        pages = [n for n in range(stored, len(keys)) if keys[n] not in self._storing_pages]
        room = self._content.room_for_pages
        if self._has_states:
            reach = pages[room] if len(pages) > room else len(keys)
            return self._choose_with_states(keys, ends, pages, reach)
        if len(pages) > room:
            self._skip(self._why_no_room(keys))
        return _Rows(pages[:room], [])

    def _choose_with_states(
        self, keys: tuple[bytes, ...], ends: list[int], pages: list[int], reach: int
    ) -> _Rows:
        # Only the first `reach` pages have room, and pages past the last state are of no use.
        missing = [end for end in ends if not self._has_state(keys[end - 1])]
        fitting = [end for end in missing if end <= reach]
        if len(fitting) < len(missing):
            self._skip(self._why_no_room(keys))
        chosen = fitting[: self._content.room_for_states]
        if len(chosen) < len(fitting):
            self._skip(SkipReason.STATES_PINNED)
        if not chosen:
            return _NOTHING
        return _Rows([page for page in pages if page < chosen[0]], chosen)

    def _why_no_room(self, keys: tuple[bytes, ...]) -> SkipReason:
        too_long = len(keys) > self._geometry.num_pages
        return SkipReason.TOO_LONG if too_long else SkipReason.PAGES_PINNED

    def _has_state(self, key: bytes) -> bool:
        page = self._content.index.page(key)
        stored = page != ABSENT and self._content.index.state(page) != ABSENT
        return stored or key in self._storing_states

    def commit(self, plan: StorePlan) -> None:
        """All rows of the plan have arrived: serve them.

        Raises:
            KeyError: the plan was committed or abandoned before.
        """
        self._end(plan)
        num_pages, states = 0, []
        if plan.serial in self._flushed_plans:
            self._skip(SkipReason.FLUSHED)
        else:
            num_pages = self._publish_pages(plan)
            states = [
                state
                for state, key in zip(plan.states, self._state_keys(plan), strict=True)
                if self._content.publish_state(state.host_state, key, plan.stamp)
            ]
            if (num_pages, len(states)) != (len(plan.host_pages), len(plan.states)):
                self._skip(SkipReason.PREFIX_LOST)
        self._counts.stored_pages += num_pages
        self._counts.stored_states += len(states)
        self._leave(plan, plan.host_pages[num_pages:], [s for s in plan.states if s not in states])

    def abandon(self, plan: StorePlan) -> None:
        """The copy failed, and nothing writes to the plan's rows any more.

        Raises:
            KeyError: the plan was committed or abandoned before.
        """
        self._end(plan)
        self._skip(SkipReason.COPY_FAILED)
        self._leave(plan, plan.host_pages, plan.states)

    def flush(self) -> None:
        self._flushed_plans.update(self._plans)
        self._storing_pages.clear()
        self._storing_states.clear()

    def _publish_pages(self, plan: StorePlan) -> int:
        return self._content.publish_pages(
            plan.host_pages,
            _page_keys(plan),
            [plan.keys[block - 1] if block else None for block in plan.blocks.tolist()],
            plan.stamp,
        )

    def _end(self, plan: StorePlan) -> None:
        del self._plans[plan.serial]
        self._pending_bytes -= plan.num_bytes
        if plan.serial not in self._flushed_plans:
            self._storing_pages.difference_update(_page_keys(plan))
            self._storing_states.difference_update(self._state_keys(plan))

    def _leave(self, plan: StorePlan, pages: IndexArray, states: Sequence[AnchorState]) -> None:
        self._content.pages.free(pages)
        self._content.states.free(state.host_state for state in states)
        self._content.unpin(plan.prefix)
        self._flushed_plans.discard(plan.serial)

    def _state_keys(self, plan: StorePlan) -> list[bytes]:
        return [plan.keys[state.position // self._page_tokens - 1] for state in plan.states]

    def _skip(self, reason: SkipReason) -> None:
        self._counts.skipped_stores[reason] = self._counts.skipped_stores.get(reason, 0) + 1

    def check_integrity(self, reading: Sequence[PinnedPrefix]) -> None:
        plans = list(self._plans.values())
        pages = [page for plan in plans for page in plan.host_pages.tolist()]
        states = [state.host_state for plan in plans for state in plan.states]
        pinned = [*reading, *(plan.prefix for plan in plans)]
        self._content.check_integrity(pinned, pages, states)
        live = [plan for plan in plans if plan.serial not in self._flushed_plans]
        if sorted(k for p in live for k in _page_keys(p)) != sorted(self._storing_pages):
            raise AssertionError("a page is being stored twice, or not by a plan")
        if sorted(k for p in live for k in self._state_keys(p)) != sorted(self._storing_states):
            raise AssertionError("a state is being stored twice, or not by a plan")
        if self._pending_bytes != sum(plan.num_bytes for plan in plans):
            raise AssertionError("the pending bytes are not those of the plans")
        if not self._flushed_plans <= self._plans.keys():
            raise AssertionError("a plan that is over is remembered as flushed")


def _page_keys(plan: StorePlan) -> list[bytes]:
    return [plan.keys[block] for block in plan.blocks.tolist()]
