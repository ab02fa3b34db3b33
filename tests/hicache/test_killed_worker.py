"""A worker is killed with SIGKILL in the middle of a store; the next one serves what was whole."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hicache.cache.outcomes import Hit
from hicache.pool.segment import create_segment

PROGRAM = Path(__file__).with_name("storing_worker.py")
_spec = importlib.util.spec_from_file_location("storing_worker", PROGRAM)
assert _spec is not None and _spec.loader is not None
worker = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(worker)


@pytest.fixture
def segment():
    fd = create_segment("killed-worker")
    yield fd
    os.close(fd)


@contextlib.contextmanager
def storing(fd: int, first: int, stop_in: int = -1):
    """The worker's output; it is killed at the end of the block."""
    with subprocess.Popen(
        [sys.executable, PROGRAM, str(fd), str(first), str(stop_in)],
        pass_fds=[fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process.stdout
        process.kill()


def hit_tokens(cache, prompt: int) -> int:
    found = cache.lookup(cache.keys(worker.tokens_of(prompt)))
    if not isinstance(found, Hit):
        return 0
    cache.release(found)
    return found.num_tokens


def check_rows(pool) -> int:
    """All valid slots hold whole rows of their own key; how many pages there are."""
    for table, rows in (
        (pool.page_headers, pool.pages.memory),
        (pool.state_headers, pool.states.memory),
    ):
        for found in table.valid_headers():
            key = np.frombuffer(found.key, np.uint8)
            assert (rows[found.row].reshape(-1, len(key)) == key).all(), "half a row is served"
    return len(pool.page_headers.valid_headers())


def test_what_was_stored_is_served_and_what_was_half_stored_is_not(segment):
    with storing(segment, first=0, stop_in=3) as lines:
        assert [next(lines).strip() for _ in range(4)] == ["0", "1", "2", "half"]
    pool, cache = worker.open_cache(segment)
    assert pool.recovered
    cache.check_integrity()
    assert [hit_tokens(cache, prompt) for prompt in range(4)] == [160, 160, 160, 0]
    check_rows(pool)
    stats = cache.stats()
    assert stats.recovered_pages == stats.pages_used == 10 + 5 + 5
    assert stats.pages_free == stats.num_pages - stats.pages_used, "half-written slots are free"
    pool.close()


def test_any_moment_of_a_kill_will_do(segment):
    """Also in a full pool, where a store begins with evictions."""
    first = 0
    for lines_before_the_kill in (1, 9, 17, 30):
        with storing(segment, first) as lines:
            last = [int(next(lines)) for _ in range(lines_before_the_kill)][-1]
        pool, cache = worker.open_cache(segment)
        cache.check_integrity()
        assert check_rows(pool) >= 10
        # The worker went on for a while after the line that was read last.
        hits = [hit_tokens(cache, prompt) for prompt in range(max(0, last - 40), last + 1000)]
        assert set(hits) == {0, 160}, "all of a prompt or nothing"
        pool.close()
        first = last + 2000
