"""The cache, the pool and the copies together."""

from __future__ import annotations

import numpy as np

from hicache.cache.outcomes import Hit
from hicache.copies.row_copy import HostRowCopier
from hicache.copies.rows import HostRows


def test_a_conversation_comes_back_from_the_pool_as_it_was_computed(make_cache):
    """Store turn after turn from one device pool, load into another: every page has its bytes, in a
    pool so small that turns push each other out."""
    rng = np.random.default_rng(3)
    small = make_cache(num_pages=30, num_states=6)
    pages, states = small.pool.pages, small.pool.states
    device = np.zeros((40, pages.row_bytes), np.uint8)
    device_states = np.zeros((4, states.row_bytes + 16), np.uint8)
    page_copier = HostRowCopier(HostRows.of(device), pages)
    state_copier = HostRowCopier(HostRows.of(device_states[:, : states.row_bytes]), states)
    computed: dict[bytes, np.ndarray] = {}
    hits = 0
    for _ in range(300):
        tokens = np.array([rng.integers(0, 4), *range(rng.integers(4, 80))], np.int32)
        prompt = small.cache.keys(tokens)
        table = rng.permutation(40)[: len(prompt.keys)].astype(np.int32)
        found = small.cache.lookup(prompt)
        if isinstance(found, Hit):
            count = len(found.host_pages)
            device[table[:count]] = 0
            page_copier.load(table[:count], found.host_pages)
            state_copier.load(np.array([2], np.int32), np.array([found.host_state], np.int32))
            for row, key in zip(table, prompt.keys[:count], strict=False):
                assert np.array_equal(device[row], computed[key])
            assert np.array_equal(device_states[2, :32], computed[prompt.keys[count - 1]][:32])
            small.cache.release(found)
            hits += 1
        for row, key in zip(table, prompt.keys, strict=True):
            computed.setdefault(key, rng.integers(0, 256, 64, np.uint8))
            device[row] = computed[key]
        plan = small.cache.stores.begin(prompt)
        if plan is not None:
            page_copier.store(table[plan.blocks], plan.host_pages)
            for position, slot in plan.states:
                device_states[1, :32] = computed[prompt.keys[position // 4 - 1]][:32]
                state_copier.store(np.array([1], np.int32), np.array([slot], np.int32))
            small.cache.stores.commit(plan)
    assert hits > 50
    assert small.cache.stats().counts.evicted_pages > 100
    del page_copier, state_copier, pages, states
