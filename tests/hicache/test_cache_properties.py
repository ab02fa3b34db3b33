"""Any interleaving of lookups, stores, failures, flushes and kills against a simple model.

Every row is written with bytes that follow from the tokens it stands for, and is compared whenever a
hit reads it: when the hit begins and again when it ends. So a page under a wrong key, a row that is
not whole, and a row overwritten while it is read all show.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from hicache.cache.index import ABSENT
from hicache.cache.outcomes import Hit, StorePlan
from hicache.cache.prefix_cache import PrefixCache
from hicache.pool.host_pool import HostPool, PoolGeometry
from hicache.pool.segment import create_segment

PAGE = 4
PAGE_BYTES = 64
STATE_BYTES = 48
ROOMY = 400
"""More pages and states than these tests can store: nothing is evicted, so hits are predictable."""

Prefix = tuple[str, str, tuple[int, ...]]
"""Fingerprint, salt and tokens: what a page or a state stands for."""


class Sizes(NamedTuple):
    num_pages: int
    num_states: int
    max_pending_bytes: int = 1 << 30


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


def make_prompt(salt: str, num_pages: int, edited: int, page: int, rest: int) -> Prompt:
    """All prompts begin alike; an edit makes another conversation from there on."""
    firsts = [page if at == edited else 0 for at in range(num_pages)]
    return Prompt(salt, (*(token for first in firsts for token in (first, 1, 2, 3)), *[9] * rest))


def content(kind: str, prefix: Prefix, size: int) -> np.ndarray:
    return np.frombuffer(
        blake2b(repr((kind, prefix)).encode(), digest_size=size).digest(), np.uint8
    )


class CheckedCache:
    """A cache, the model beside it, and all comparisons of the two."""

    def __init__(self, sizes: Sizes, replay: int) -> None:
        self.sizes, self.replay = sizes, replay
        self.exact = sizes.num_pages == ROOMY
        self.fd = create_segment("properties")
        self.fingerprint = "model"
        self.now = 0
        self.pages: set[Prefix] = set()
        self.states: set[Prefix] = set()
        self.reading: list[ReadingHit] = []
        self.running: list[RunningStore] = []
        self.attach()

    def attach(self) -> None:
        num_pages, num_states, limit = self.sizes
        geometry = PoolGeometry(
            self.fingerprint, PAGE_BYTES, num_pages, STATE_BYTES if num_states else 0, num_states
        )
        self.pool = HostPool(self.fd, geometry, 1 << 40)
        self.cache = PrefixCache(
            self.pool,
            page_tokens=PAGE,
            replay_tokens=self.replay,
            max_pending_bytes=limit,
            clock=self.clock,
        )

    def clock(self) -> int:
        self.now += 1
        return self.now // 3

    # ---- the model ----

    def prefix(self, prompt: Prompt, pages: int) -> Prefix:
        return (self.fingerprint, prompt.salt, prompt.tokens[: pages * PAGE])

    def prefixes(self, prompt: Prompt, pages: int) -> list[Prefix]:
        return [self.prefix(prompt, n) for n in range(1, pages + 1)]

    def predicted_hit(self, prompt: Prompt) -> int:
        most = max(0, len(prompt.tokens) - self.replay) // PAGE
        found = 0
        while found < most and self.prefix(prompt, found + 1) in self.pages:
            found += 1
        if self.sizes.num_states:
            while found and self.prefix(prompt, found) not in self.states:
                found -= 1
        return found * PAGE

    def rows_to_store(self, prompt: Prompt, anchors: list[int]) -> tuple[list[Prefix], set[Prefix]]:
        live = [store for store in self.running if not store.flushed]
        pages = {p for store in live for p in store.pages} | self.pages
        states = {s for store in live for s in store.states} | self.states
        ends = {self.prefix(prompt, at // PAGE) for at in anchors if at} - states
        count = len(prompt.tokens) // PAGE
        if self.sizes.num_states:
            count = max((len(tokens) // PAGE for _, _, tokens in ends), default=0)
        return [p for p in self.prefixes(prompt, count) if p not in pages], ends

    # ---- loading ----

    def look_up(self, prompt: Prompt) -> ReadingHit | None:
        keys = self.cache.keys(prompt.array(), prompt.salt)
        findable = self.cache.findable_tokens(keys)
        found = self.cache.lookup(keys)
        num_tokens = found.num_tokens if isinstance(found, Hit) else 0
        assert findable == num_tokens
        if self.exact:
            assert num_tokens == self.predicted_hit(prompt)
        if not isinstance(found, Hit):
            return None
        assert num_tokens % PAGE == 0
        assert num_tokens <= len(prompt.tokens) - self.replay
        assert num_tokens <= found.matched_tokens
        pages = self.prefixes(prompt, num_tokens // PAGE)
        assert self.pages.issuperset(pages), "a page that was never stored"
        state = pages[-1] if self.sizes.num_states else None
        assert (found.host_state == ABSENT) == (state is None)
        assert state is None or state in self.states, "a state that was never stored"
        reading = ReadingHit(found, pages, state)
        self.check_rows(reading)
        self.reading.append(reading)
        return reading

    def release(self, reading: ReadingHit) -> None:
        if reading in self.reading:  # else its process was killed
            self.check_rows(reading)
            self.reading.remove(reading)
            self.cache.release(reading.hit)

    def check_rows(self, reading: ReadingHit) -> None:
        for slot, prefix in zip(reading.hit.host_pages, reading.pages, strict=True):
            wanted = content("page", prefix, PAGE_BYTES)
            np.testing.assert_array_equal(self.pool.pages.memory[slot], wanted)
        if reading.state is not None:
            row = self.pool.states.memory[reading.hit.host_state]
            np.testing.assert_array_equal(row, content("state", reading.state, STATE_BYTES))

    # ---- storing ----

    def begin_store(self, prompt: Prompt, extra_anchor: int | None = None) -> RunningStore | None:
        anchors = list(self.cache.stores.anchors(len(prompt.tokens)))
        if extra_anchor is not None and self.sizes.num_states:
            anchors.append(extra_anchor * PAGE)
        wanted = self.rows_to_store(prompt, anchors)
        plan = self.cache.stores.begin(self.cache.keys(prompt.array(), prompt.salt), anchors)
        if plan is None:
            assert not self.exact or wanted == ([], set())
            return None
        pages = [self.prefix(prompt, page + 1) for page in plan.blocks.tolist()]
        states = [self.prefix(prompt, state.position // PAGE) for state in plan.states]
        if self.exact:
            assert (pages, set(states)) == wanted
        assert plan.num_bytes == len(pages) * PAGE_BYTES + len(states) * STATE_BYTES
        store = RunningStore(plan, pages, states)
        self.write(store, 32)
        self.running.append(store)
        return store

    def write(self, store: RunningStore, num_bytes: int) -> None:
        """The copy, up to so many bytes of each row."""
        for slot, prefix in zip(store.plan.host_pages, store.pages, strict=True):
            row = content("page", prefix, PAGE_BYTES)[:num_bytes]
            self.pool.pages.memory[slot, : len(row)] = row
        for state, prefix in zip(store.plan.states, store.states, strict=True):
            row = content("state", prefix, STATE_BYTES)[:num_bytes]
            self.pool.states.memory[state.host_state, : len(row)] = row

    def commit(self, store: RunningStore) -> None:
        if store not in self.running:
            return
        self.running.remove(store)
        self.write(store, PAGE_BYTES)
        self.cache.stores.commit(store.plan)
        if store.flushed:
            return
        for model, salt, tokens in store.pages:
            if len(tokens) > PAGE and (model, salt, tokens[:-PAGE]) not in self.pages:
                break  # the store that had the pages before failed, or is not done
            self.pages.add((model, salt, tokens))
        self.states.update(s for s in store.states if s in self.pages)

    def abandon(self, store: RunningStore) -> None:
        if store in self.running:
            self.running.remove(store)
            self.cache.stores.abandon(store.plan)

    def flush(self) -> None:
        self.cache.flush()
        self.pages.clear()
        self.states.clear()
        for store in self.running:
            store.flushed = True

    # ---- the process ----

    def kill_and_start_again(self, fingerprint: str) -> None:
        self.pool.close()
        self.running.clear()
        self.reading.clear()
        if fingerprint != self.fingerprint:
            self.fingerprint = fingerprint
            self.pages.clear()
            self.states.clear()
        before = self.cache.stats()
        self.attach()
        stats = self.cache.stats()
        assert stats.pages_pinned == stats.pending_bytes == 0
        assert stats.pages_used + stats.pages_free == stats.num_pages
        assert stats.recovered_pages == (before.pages_used if self.pages else 0)
        assert stats.recovered_states == (before.states_used if self.pages else 0)

    def end(self) -> None:
        """All users leave: nothing stays pinned or taken."""
        for reading in self.reading:
            self.check_rows(reading)
            self.cache.release(reading.hit)
        for store in self.running:
            self.cache.stores.abandon(store.plan)
        self.cache.check_integrity()
        stats = self.cache.stats()
        assert stats.pages_pinned == stats.pending_bytes == 0
        assert stats.pages_used + stats.pages_free == stats.num_pages
        self.cache.flush()
        self.cache.check_integrity()
        stats = self.cache.stats()
        assert (stats.pages_free, stats.states_free) == (stats.num_pages, stats.num_states)
        self.close()

    def close(self) -> None:
        self.pool.close()
        os.close(self.fd)


# Roomy pools, and pools that are always full.
roomy = st.builds(Sizes, st.just(ROOMY), st.sampled_from([0, ROOMY]), st.just(1 << 30))
tight = st.builds(
    Sizes,
    st.sampled_from([8, 13, 5, 3, 2, 1]),
    st.sampled_from([0, 2, 3, 8, 1]),
    st.sampled_from([1 << 30, 1 << 30, 400]),
)
prompts = st.builds(
    make_prompt,
    salt=st.sampled_from(["", "", "", "tenant"]),
    num_pages=st.sampled_from([7, 6, 5, 4, 3, 2, 1, 0]),
    edited=st.integers(0, 9),
    page=st.sampled_from([1, 2]),
    rest=st.integers(0, 3),
)


class CacheMachine(RuleBasedStateMachine):
    """Shrinks what goes wrong to the fewest steps."""

    hits = Bundle("hits")
    stores = Bundle("stores")
    checked: CheckedCache | None = None

    @initialize(sizes=roomy | tight, replay=st.sampled_from([1, 3, 4, 5, 9]))
    def begin(self, sizes, replay):
        self.checked = CheckedCache(sizes, replay)
        self.calm_steps = 0

    @rule(target=hits, prompt=prompts)
    def look_up(self, prompt):
        reading = self.checked.look_up(prompt)
        return multiple() if reading is None else reading

    @rule(reading=consumes(hits))
    def release(self, reading):
        self.checked.release(reading)

    @rule(target=stores, prompt=prompts, extra=st.none() | st.integers(0, 7))
    def begin_store(self, prompt, extra):
        extra = None if extra is None else min(extra, len(prompt.tokens) // PAGE)
        store = self.checked.begin_store(prompt, extra)
        return multiple() if store is None else store

    @rule(store=consumes(stores))
    def commit(self, store):
        self.checked.commit(store)

    @rule(store=consumes(stores))
    def abandon(self, store):
        self.checked.abandon(store)

    @rule(prompt=prompts)
    def store_at_once(self, prompt):
        store = self.checked.begin_store(prompt)
        if store is not None:
            self.checked.commit(store)

    @precondition(lambda self: self.calm_steps > 12)
    @rule()
    def flush(self):
        self.calm_steps = 0
        self.checked.flush()

    @precondition(lambda self: self.calm_steps > 8)
    @rule(fingerprint=st.sampled_from(["model", "model", "other model"]))
    def kill_and_start_again(self, fingerprint):
        self.calm_steps = 0
        self.checked.kill_and_start_again(fingerprint)

    @invariant()
    def nothing_is_inconsistent(self):
        if self.checked is not None:
            self.calm_steps += 1
            self.checked.cache.check_integrity()

    def teardown(self):
        if self.checked is not None:
            self.checked.end()


CacheMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase


@pytest.mark.parametrize("replay", [1, 5])
@pytest.mark.parametrize(
    "sizes",
    [Sizes(ROOMY, 0), Sizes(ROOMY, ROOMY), Sizes(9, 0), Sizes(20, 4), Sizes(20, 30), Sizes(5, 2)],
)
def test_a_long_life(sizes, replay):
    """Thousands of steps, most of them under pressure, at every one of which all must be right."""
    rng = random.Random(repr((sizes, replay)))
    checked = CheckedCache(sizes, replay)
    hits = evictions = 0

    def some_prompt() -> Prompt:
        salt = rng.choice(["", "", "", "tenant"])
        return make_prompt(
            salt, rng.randrange(8), rng.randrange(10), rng.randrange(4), rng.randrange(4)
        )

    for _ in range(1500):
        turn = rng.random()
        if turn < 0.35:
            hits += checked.look_up(some_prompt()) is not None
        elif turn < 0.55 and checked.reading:
            checked.release(rng.choice(checked.reading))
        elif turn < 0.75:
            prompt = some_prompt()
            checked.begin_store(
                prompt, rng.choice([None, rng.randint(0, len(prompt.tokens) // PAGE)])
            )
        elif turn < 0.92 and checked.running:
            checked.commit(rng.choice(checked.running))
        elif turn < 0.96 and checked.running:
            checked.abandon(rng.choice(checked.running))
        elif turn > 0.985:
            evictions += checked.cache.stats().counts.evicted_pages
            if rng.random() < 0.6:
                checked.kill_and_start_again(rng.choice(["model", "model", "model", "other"]))
            else:
                checked.flush()
        checked.cache.check_integrity()
    assert hits > 30
    assert (evictions > 30) != checked.exact
    checked.end()
