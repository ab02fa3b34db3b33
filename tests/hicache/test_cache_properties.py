"""Any interleaving of lookups, stores, failures, flushes and kills against a simple model.

Every row is written with bytes that follow from the tokens it stands for, and is compared whenever a
hit reads it: when the hit begins and again when it ends. So a page under a wrong key, a row that is
not whole, and a row overwritten while it is read all show.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from hicache.host_pool import HostPool, PoolGeometry
from hicache.keys import PromptKeys
from hicache.outcomes import Announcement, Hit, StorePlan
from hicache.prefix_cache import PrefixCache
from hicache.segment import create_segment

PAGE = 4
ROOMY = 400
"""More pages and states than an example can store: nothing is evicted, so all hits are predictable."""

Prefix = tuple[str, str, tuple[int, ...]]
"""Fingerprint, salt and tokens: what a page or a state stands for."""


@dataclass(frozen=True)
class Prompt:
    salt: str
    tokens: tuple[int, ...]

    def array(self) -> np.ndarray:
        return np.array(self.tokens, np.int32)


@dataclass(eq=False)
class ReadingHit:
    hit: Hit
    pages: list[Prefix]
    state: Prefix | None


@dataclass(eq=False)
class RunningStore:
    plan: StorePlan
    pages: list[Prefix]
    states: list[Prefix]
    flushed: bool = False


# Few different pages, so that prompts share prefixes and part at every depth.
prompts = st.builds(
    lambda salt, pages, rest: Prompt(salt, (*(t for p in pages for t in (p, 1, 2, 3)), *rest)),
    st.sampled_from(["", "", "", "tenant"]),
    st.lists(st.sampled_from([0, 0, 0, 1]), max_size=7),
    st.lists(st.just(9), max_size=3),
)


def content(kind: str, prefix: Prefix, size: int) -> np.ndarray:
    return np.frombuffer(
        blake2b(repr((kind, prefix)).encode(), digest_size=size).digest(), np.uint8
    )


class CacheMachine(RuleBasedStateMachine):
    hits = Bundle("hits")
    stores = Bundle("stores")
    announcements = Bundle("announcements")

    @initialize(
        num_pages=st.sampled_from([1, 2, 3, 5, 8, 13, ROOMY, ROOMY, ROOMY]),
        num_states=st.sampled_from([0, 1, 2, 3, ROOMY]),
        replay=st.integers(1, 9),
        limit=st.sampled_from([200, 1 << 30, 1 << 30]),
    )
    def begin(self, num_pages, num_states, replay, limit):
        self.fd = create_segment("properties")
        self.sizes = (64, num_pages, 48 if num_states else 0, num_states)
        self.fingerprint = "model"
        self.replay, self.limit = replay, limit
        self.now = 0
        self.exact = num_pages == ROOMY and num_states in (0, ROOMY) and limit > 200
        self.pages: set[Prefix] = set()
        self.states: set[Prefix] = set()
        self.announced: list[Announcement] = []
        self.reading: list[ReadingHit] = []
        self.running: list[RunningStore] = []
        self.attach()

    def attach(self) -> None:
        self.pool = HostPool(self.fd, PoolGeometry(self.fingerprint, *self.sizes), 1 << 40)
        self.cache = PrefixCache(
            self.pool,
            page_tokens=PAGE,
            replay_tokens=self.replay,
            max_pending_bytes=self.limit,
            clock=self.clock,
        )

    def clock(self) -> int:
        self.now += 1
        return self.now // 3

    # ---- the model ----

    def prefix(self, prompt: Prompt, pages: int) -> Prefix:
        return (self.fingerprint, prompt.salt, prompt.tokens[: pages * PAGE])

    def known_pages(self, prompt: Prompt) -> int:
        count = 0
        while count < len(prompt.tokens) // PAGE and self.prefix(prompt, count + 1) in self.pages:
            count += 1
        return count

    def predicted_hit(self, prompt: Prompt) -> int:
        most = max(0, len(prompt.tokens) - self.replay) // PAGE
        found = min(most, self.known_pages(prompt))
        if self.sizes[2]:
            while found and self.prefix(prompt, found) not in self.states:
                found -= 1
        return found * PAGE

    def check_rows(self, reading: ReadingHit) -> None:
        for slot, prefix in zip(reading.hit.page_slots, reading.pages, strict=True):
            np.testing.assert_array_equal(self.pool.page_rows[slot], content("page", prefix, 64))
        if reading.state is not None:
            row = self.pool.state_rows[reading.hit.state_slot]
            np.testing.assert_array_equal(row, content("state", reading.state, 48))

    # ---- loading ----

    @rule(target=hits, prompt=prompts)
    def lookup(self, prompt):
        keys = self.cache.keys(prompt.array(), prompt.salt)
        found = self.cache.lookup(keys)
        num_tokens = found.num_tokens if isinstance(found, Hit) else 0
        if self.exact:
            assert num_tokens == self.predicted_hit(prompt)
        if not isinstance(found, Hit):
            return multiple()
        assert num_tokens % PAGE == 0
        assert num_tokens <= len(prompt.tokens) - self.replay
        assert num_tokens <= found.matched_tokens
        count = num_tokens // PAGE
        pages = [self.prefix(prompt, n) for n in range(1, count + 1)]
        assert self.pages.issuperset(pages), "a page that was never stored"
        state = self.prefix(prompt, count) if self.sizes[2] else None
        assert (found.state_slot is None) == (state is None)
        assert state is None or state in self.states, "a state that was never stored"
        reading = ReadingHit(found, pages, state)
        self.check_rows(reading)
        self.reading.append(reading)
        return reading

    @rule(reading=consumes(hits))
    def release(self, reading):
        if reading in self.reading:  # else its process was killed
            self.check_rows(reading)
            self.reading.remove(reading)
            self.cache.release(reading.hit)

    # ---- storing ----

    @rule(target=stores, prompt=prompts, extra=st.none() | st.integers(0, 7))
    def begin_store(self, prompt, extra):
        anchors = list(self.cache.anchors(len(prompt.tokens)))
        if extra is not None and self.sizes[2] and extra * PAGE <= len(prompt.tokens):
            anchors.append(extra * PAGE)
        wanted = self.rows_to_store(prompt, anchors)
        plan = self.cache.begin_store(self.cache.keys(prompt.array(), prompt.salt), anchors)
        if plan is None:
            assert not self.exact or wanted == ([], [])
            return multiple()
        pages = [self.prefix(prompt, page + 1) for page in plan.page_indexes.tolist()]
        states = [self.prefix(prompt, state.position // PAGE) for state in plan.states]
        if self.exact:
            assert (pages, sorted(states)) == (wanted[0], sorted(wanted[1]))
        assert plan.num_bytes == len(pages) * 64 + len(states) * 48
        store = RunningStore(plan, pages, states)
        self.write(store, whole=False)
        self.running.append(store)
        return store

    def rows_to_store(self, prompt: Prompt, anchors) -> tuple[list[Prefix], list[Prefix]]:
        live = [store for store in self.running if not store.flushed]
        pages = {p for store in live for p in store.pages} | self.pages
        states = {s for store in live for s in store.states} | self.states
        ends = {self.prefix(prompt, at // PAGE) for at in anchors if at} - states
        count = len(prompt.tokens) // PAGE
        if self.sizes[2]:
            count = max((len(tokens) // PAGE for _, _, tokens in ends), default=0)
        wanted = [self.prefix(prompt, n) for n in range(1, count + 1)]
        return [prefix for prefix in wanted if prefix not in pages], list(ends)

    def write(self, store: RunningStore, *, whole: bool) -> None:
        """The copy: at first a part of it, the rest before the commit."""
        for slot, prefix in zip(store.plan.page_slots, store.pages, strict=True):
            self.pool.page_rows[slot, : 64 if whole else 32] = content("page", prefix, 64)[
                : 64 if whole else 32
            ]
        for state, prefix in zip(store.plan.states, store.states, strict=True):
            self.pool.state_rows[state.slot, : 48 if whole else 20] = content("state", prefix, 48)[
                : 48 if whole else 20
            ]

    @rule(store=consumes(stores))
    def commit(self, store):
        if store not in self.running:
            return
        self.running.remove(store)
        self.write(store, whole=True)
        self.cache.commit(store.plan)
        if store.flushed:
            return
        for model, salt, tokens in store.pages:
            if len(tokens) > PAGE and (model, salt, tokens[:-PAGE]) not in self.pages:
                break  # another store failed that had the pages before
            self.pages.add((model, salt, tokens))
        self.states.update(s for s in store.states if s in self.pages)

    @rule(store=consumes(stores))
    def abandon(self, store):
        if store in self.running:
            self.running.remove(store)
            self.cache.abandon(store.plan)

    @rule()
    def flush(self):
        self.cache.flush()
        self.pages.clear()
        self.states.clear()
        for store in self.running:
            store.flushed = True

    # ---- announcing ----

    @rule(target=announcements, prompt=prompts)
    def announce(self, prompt):
        keys = self.cache.keys(prompt.array(), prompt.salt)
        announcement = self.cache.announce(keys)
        self.announced.append(announcement)
        assert self.cache.longest_announced(keys) <= max(0, len(prompt.tokens) - self.replay)
        return announcement

    @rule(announcement=announcements)
    def withdraw(self, announcement):
        if announcement in self.announced:
            self.announced.remove(announcement)
            self.cache.withdraw(announcement)

    # ---- the process ----

    @rule(fingerprint=st.sampled_from(["model", "model", "other model"]))
    def kill_and_start_again(self, fingerprint):
        self.pool.close()
        self.running.clear()
        self.reading.clear()
        self.announced.clear()
        if fingerprint != self.fingerprint:
            self.fingerprint = fingerprint
            self.pages.clear()
            self.states.clear()
        self.attach()
        stats = self.cache.stats()
        assert stats.pages_pinned == stats.pending_bytes == 0
        assert stats.pages_used + stats.pages_free == stats.num_pages
        if self.exact:
            assert stats.recovered_pages == len(self.pages)
            assert stats.recovered_states == len(self.states)

    @invariant()
    def nothing_is_inconsistent(self):
        self.cache.check_integrity()

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        for reading in self.reading:
            self.check_rows(reading)
            self.cache.release(reading.hit)
        for store in self.running:
            self.cache.abandon(store.plan)
        for announcement in self.announced:
            self.cache.withdraw(announcement)
        self.cache.check_integrity()
        stats = self.cache.stats()
        assert stats.pages_pinned == stats.pending_bytes == 0
        self.cache.flush()
        self.cache.check_integrity()
        stats = self.cache.stats()
        assert (stats.pages_free, stats.states_free) == (stats.num_pages, stats.num_states)
        assert self.cache.longest_announced(PromptKeys(100, (b"",))) == 0
        self.pool.close()
        os.close(self.fd)


CacheMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase
