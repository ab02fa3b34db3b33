"""Copies that the device refuses: a store is skipped, a load ends the engine, and the cause is seen."""

from __future__ import annotations

import logging
import os

import pytest

from hicache.cache.outcomes import SkipReason
from hicache.copies.open import open_cache_copies
from hicache.errors import PrefixLoadError
from hicache.manager.host import PoolOrder, open_host_prefix_cache
from hicache.pool.segment import create_segment
from tests.support.rank import Rank
from transport.telemetry.metrics import MetricSet
from workers.engine.fake import FakeEngine, FakeEngineSettings

COMMON = [1, 2, 3, 4, 5, 6, 7] * 6


@pytest.mark.parametrize("call", ["store_pages", "store_state"])
def test_a_store_that_fails_is_skipped_and_the_requests_go_on(make_rank, caplog, call):
    rank = make_rank(5, 11, delay=3)
    rank.copies.refused = {call}
    prompts = [[*COMMON, number, number] for number in range(4)]
    with caplog.at_level(logging.ERROR):
        for number, prompt in enumerate(prompts):
            rank.add(number, prompt, 3)
        rank.run()
    for number, prompt in enumerate(prompts):
        assert rank.tokens_of(number) == rank.simulate(prompt, 3)
    assert rank.cached_of(0, 1, 2, 3) == [0, 0, 0, 0]
    stats = rank.cache.stats()
    assert stats.counts.skipped_stores == {SkipReason.COPY_FAILED: 4}
    assert (stats.pages_free, stats.states_free) == (stats.num_pages, stats.num_states)
    rank.check_rest()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and f"refuses to {call}" in told[0], "once, with its cause"


def test_what_was_under_way_when_a_store_failed_arrives_before_its_slots_are_free(make_rank):
    rank = make_rank(5, 11, delay=30)
    rank.copies.refused = {"store_state"}
    rank.add(0, [*COMMON, 0], 1)
    for _ in range(10):
        rank.turn()
    assert rank.tokens_of(0)
    stats = rank.cache.stats()
    assert stats.num_pages - stats.pages_free == len(COMMON) // 8
    rank.run()
    assert rank.cache.stats().pages_free == stats.num_pages


def test_after_a_store_that_failed_the_next_one_may_succeed(make_rank):
    rank = make_rank()
    rank.copies.refused = {"store_pages"}
    rank.add(0, COMMON, 1)
    rank.run()
    rank.copies.refused = set()
    for number in (1, 2):
        rank.add(number, COMMON, 1)
        rank.run()
    assert rank.cached_of(0, 1, 2) == [0, 0, 40]


@pytest.mark.parametrize("call", ["load_pages", "load_state"])
def test_a_load_that_fails_ends_the_engine_but_not_the_next_one(call):
    """The step that is planned counts on its rows. The next worker computes the prompt."""
    fd = create_segment("test")
    for restart in range(2):
        rank = Rank(fd, 5, 11)
        rank.copies.refused = {call}
        if not restart:
            rank.add(0, COMMON, 1)
            rank.run()
        rank.add(1, COMMON, 3)
        if restart:
            rank.run()
            assert rank.tokens_of(1) == rank.simulate(COMMON, 3)
        else:
            with pytest.raises(PrefixLoadError, match=f"cannot be loaded.*refuses to {call}"):
                rank.run()
        rank.close()
    os.close(fd)


def test_closing_does_not_hide_why_the_worker_ends():
    """The traceback of the error that ends it may hold rows of the pool."""
    fd = create_segment("test")
    engine = FakeEngine(FakeEngineSettings(100, 8, 2, 1024))
    layout = engine.info.layout
    order = PoolOrder(fd, layout.page_bytes * 4, 0)

    def copies(pool):
        device = engine.device_cache()
        return open_cache_copies(device, pool.memory, pool.pages, pool.states, "auto")

    manager = open_host_prefix_cache(order, layout, 1 << 30, copies, MetricSet())

    def fail(copies) -> None:
        raise ZeroDivisionError("the cause")

    def serve() -> None:
        try:
            fail(manager.transfers._copies)
        finally:
            engine.close()
            manager.close()

    with pytest.raises(ZeroDivisionError, match="the cause"):
        serve()
    os.close(fd)
