"""A worker that does nothing but store prompts into an inherited pool, until it is killed.

    python storing_worker.py FD FIRST_PROMPT STOP_IN

It prints a line per committed prompt. In prompt number STOP_IN it writes half the rows, says "half",
and waits for ever. A page row is its key over and over, so that any reader can tell a whole row.
"""

from __future__ import annotations

import sys
from itertools import count

import numpy as np

from hicache.cache.prefix_cache import PrefixCache
from hicache.pool.host_pool import HostPool, PoolGeometry

GEOMETRY = PoolGeometry("model", page_bytes=64 * 1024, num_pages=64, state_bytes=4096, num_states=6)
PAGE_TOKENS = 16


def tokens_of(prompt: int) -> np.ndarray:
    """Ten pages and a bit; every third prompt begins like the one before."""
    base = np.arange(165, dtype=np.int32)
    base[80:] += 1000 * (prompt + 1)
    base[0] = prompt // 3
    return base


def open_cache(fd: int) -> tuple[HostPool, PrefixCache]:
    pool = HostPool(fd, GEOMETRY, 1 << 40)
    cache = PrefixCache(pool, page_tokens=PAGE_TOKENS, replay_tokens=5, max_pending_bytes=1 << 30)
    return pool, cache


def main() -> None:
    fd, first, stop_in = map(int, sys.argv[1:])
    pool, cache = open_cache(fd)
    for prompt in count(first):
        keys = cache.keys(tokens_of(prompt))
        plan = cache.stores.begin(keys)
        assert plan is not None
        for done, (page, slot) in enumerate(zip(plan.blocks, plan.host_pages, strict=True)):
            key = np.frombuffer(keys.keys[page], np.uint8)
            pool.pages.memory[slot] = np.tile(key, GEOMETRY.page_bytes // len(key))
            if prompt == stop_in and 2 * done > len(plan.host_pages):
                print("half", flush=True)
                sys.stdin.read()
        for position, slot in plan.states:
            key = np.frombuffer(keys.keys[position // PAGE_TOKENS - 1], np.uint8)
            pool.states.memory[slot] = np.tile(key, GEOMETRY.state_bytes // len(key))
        cache.stores.commit(plan)
        print(prompt, flush=True)


if __name__ == "__main__":
    main()
