"""What a prompt may load, what a prefill stores, and what people are told about it.

Pages of 4 tokens; at least the last 3 tokens of a prompt are computed anew.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from hicache.cache.index import ABSENT
from hicache.cache.outcomes import Hit, Miss, MissReason, SkipReason
from hicache.keys import PromptKeys


def numbered(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def keys_of(small, tokens: list[int], salt: str = "") -> PromptKeys:
    return small.cache.keys(np.array(tokens, np.int32), salt)


def lookup(small, tokens: list[int], salt: str = "", request_id: str = "") -> Hit | Miss:
    return small.cache.lookup(keys_of(small, tokens, salt), request_id)


# ---- how far a hit goes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "hit"), [(3, 0), (6, 0), (7, 4), (10, 4), (11, 8), (14, 8), (15, 12), (40, 20)]
)
def test_a_hit_ends_at_a_page_border_and_leaves_tokens_to_replay(make_cache, length, hit):
    small = make_cache(num_pages=50)
    small.store(numbered(23))
    assert small.hit(numbered(length)) == hit


def test_a_hit_names_the_slots_of_its_pages_in_order(make_cache):
    small = make_cache(num_pages=50)
    plan = small.cache.stores.begin(keys_of(small, numbered(16)))
    assert plan.blocks.tolist() == [0, 1, 2, 3]
    assert plan.states == () and plan.num_bytes == 4 * 64
    small.cache.stores.commit(plan)
    hit = lookup(small, numbered(12))
    assert hit.host_pages.tolist() == plan.host_pages[:2].tolist()
    assert hit.host_state == ABSENT


def test_a_hit_ends_where_a_state_is(make_cache):
    small = make_cache(num_pages=50, num_states=9)
    small.store(numbered(24), anchors=(8, 16))
    assert small.hit(numbered(12)) == 8
    assert small.hit(numbered(19)) == 16
    assert small.hit(numbered(40)) == 16
    assert lookup(small, numbered(10)) == Miss(MissReason.NO_STATE, 4)


def test_two_anchors_serve_the_same_prompt_and_the_next_turn(make_cache):
    small = make_cache(num_pages=50, num_states=9)
    assert small.cache.stores.anchors(21) == (20, 16)
    assert small.cache.stores.anchors(23) == (20,), "both are the same"
    assert small.cache.stores.anchors(6) == (4,)
    assert small.cache.stores.anchors(3) == ()
    small.store(numbered(21))
    assert small.hit(numbered(21)) == 16
    assert small.hit(numbered(60)) == 20


def test_models_without_states_have_no_anchors(make_cache):
    small = make_cache(num_pages=50)
    assert small.cache.stores.anchors(21) == ()


def test_a_branch_can_get_its_own_state(make_cache):
    """Two prompts share a beginning that ends at no anchor of the first. The second lookup tells
    where they part, its store keeps a state there, and the third prompt hits."""
    small = make_cache(num_pages=50, num_states=9)
    shared = numbered(12)
    small.store(shared + numbered(20, 100))
    second = shared + numbered(20, 200)
    miss = lookup(small, second)
    assert miss == Miss(MissReason.NO_STATE, 12)
    small.store(second, (*small.cache.stores.anchors(len(second)), miss.matched_tokens))
    assert small.hit(shared + numbered(20, 300)) == 12


@pytest.mark.parametrize("anchor", [3, 18, 24, -4])
def test_a_state_within_a_page_or_beyond_the_prompt_is_an_error(make_cache, anchor):
    small = make_cache(num_pages=50, num_states=9)
    with pytest.raises(ValueError, match=f"at token {anchor} of 22"):
        small.cache.stores.begin(keys_of(small, numbered(22)), [anchor])
    small.cache.check_integrity()


def test_tenants_share_nothing(make_cache):
    small = make_cache(num_pages=50)
    small.store(numbered(20), salt="one")
    assert small.hit(numbered(20), salt="one") == 16
    assert small.hit(numbered(20), salt="two") == 0
    assert small.hit(numbered(20)) == 0


def test_another_fingerprint_never_hits(make_cache):
    small = make_cache(num_pages=50)
    small.store(numbered(20))
    small.restart("retrained model")
    assert small.hit(numbered(20)) == 0
    small.restart("model")
    assert small.hit(numbered(20)) == 0


def test_a_long_prompt(make_cache):
    small = make_cache(num_pages=41_000)
    tokens = numbered(163_000)
    assert small.store(tokens)
    assert small.hit(tokens) == 162_996
    assert small.hit([*tokens[:81_000], 0, *tokens[81_001:]]) == 81_000
    small.restart()
    assert small.hit(tokens) == 162_996


# ---- stores ---------------------------------------------------------------------------------------


def test_only_what_is_missing_is_copied(make_cache):
    small = make_cache(num_pages=50, num_states=9)
    assert small.store(numbered(21))
    assert not small.store(numbered(21)), "all there"
    plan = small.cache.stores.begin(keys_of(small, numbered(32)))
    assert plan.blocks.tolist() == [5, 6, 7]
    assert [state.position for state in plan.states] == [32, 28]


def test_two_stores_at_once_share_the_work(make_cache):
    small = make_cache(num_pages=50)
    first = small.cache.stores.begin(keys_of(small, numbered(16)))
    second = small.cache.stores.begin(keys_of(small, numbered(32)))
    assert second.blocks.tolist() == [4, 5, 6, 7]
    assert small.hit(numbered(40)) == 0, "not before the rows are whole"
    small.cache.stores.commit(first)
    assert small.hit(numbered(40)) == 16
    small.cache.stores.commit(second)
    assert small.hit(numbered(40)) == 32


def test_pages_behind_a_failed_store_are_not_served(make_cache):
    small = make_cache(num_pages=50)
    first = small.cache.stores.begin(keys_of(small, numbered(16)))
    second = small.cache.stores.begin(keys_of(small, numbered(32)))
    small.cache.stores.abandon(first)
    small.cache.stores.commit(second)
    small.cache.check_integrity()
    stats = small.cache.stats()
    assert (stats.pages_used, stats.pages_free) == (0, 50)
    assert stats.counts.skipped_stores == {SkipReason.COPY_FAILED: 1, SkipReason.PREFIX_LOST: 1}


def test_a_full_pool_skips_the_store_and_counts_it(make_cache):
    small = make_cache(num_pages=4, num_states=2)
    small.store(numbered(16), anchors=(16,))
    held = lookup(small, numbered(19))
    assert held.num_tokens == 16
    assert not small.store(numbered(16, 100))
    assert small.cache.stats().counts.skipped_stores == {SkipReason.PAGES_PINNED: 1}
    small.cache.release(held)
    assert small.store(numbered(16, 100))


def test_pinned_states_skip_the_store_and_count_it(make_cache):
    small = make_cache(num_pages=40, num_states=1)
    small.store(numbered(16), anchors=(16,))
    held = lookup(small, numbered(19))
    assert not small.store(numbered(16, 100))
    assert small.cache.stats().counts.skipped_stores == {SkipReason.STATES_PINNED: 1}
    assert small.cache.stats().counts.evicted_pages == 0
    small.cache.release(held)


def test_without_states_a_full_pool_keeps_the_beginning(make_cache):
    small = make_cache(num_pages=5)
    assert small.store(numbered(40))
    assert small.hit(numbered(40)) == 20
    assert small.cache.stats().counts.skipped_stores == {SkipReason.TOO_LONG: 1}


def test_with_states_a_prompt_longer_than_the_pool_keeps_what_has_a_state_and_fits(make_cache):
    small = make_cache(num_pages=5, num_states=2)
    assert small.cache.stores.anchors(24) == (24, 20)
    assert small.store(numbered(24))
    assert small.hit(numbered(24)) == 20
    stats = small.cache.stats()
    assert (stats.pages_used, stats.states_used) == (5, 1)
    assert stats.counts.skipped_stores == {SkipReason.TOO_LONG: 1}


def test_a_state_without_room_is_counted_and_the_others_stored(make_cache):
    small = make_cache(num_pages=40, num_states=1)
    assert small.store(numbered(24))
    assert small.hit(numbered(40)) == 24
    assert small.cache.stats().counts.skipped_stores == {SkipReason.STATES_PINNED: 1}


def test_with_states_a_prompt_that_does_not_fit_evicts_nothing(make_cache):
    small = make_cache(num_pages=5, num_states=2)
    small.store(numbered(16), anchors=(16,))
    assert not small.store(numbered(40, 100))
    assert small.hit(numbered(19)) == 16
    assert small.cache.stats().counts.skipped_stores == {SkipReason.TOO_LONG: 1}


def test_bytes_under_way_are_bounded(make_cache):
    small = make_cache(num_pages=50, max_pending_bytes=6 * 64)
    large = small.cache.stores.begin(keys_of(small, numbered(40)))
    assert large is not None, "one may always go"
    assert small.cache.stores.begin(keys_of(small, numbered(4, 100))) is None
    small.cache.stores.commit(large)
    first = small.cache.stores.begin(keys_of(small, numbered(16, 200)))
    second = small.cache.stores.begin(keys_of(small, numbered(8, 300)))
    assert small.cache.stats().pending_bytes == 6 * 64
    assert small.cache.stores.begin(keys_of(small, numbered(4, 400))) is None
    assert small.cache.stats().counts.skipped_stores == {SkipReason.PENDING: 2}
    small.cache.stores.commit(first)
    small.cache.stores.abandon(second)
    assert small.cache.stats().pending_bytes == 0


def test_ending_anything_twice_is_an_error(make_cache):
    small = make_cache(num_pages=50)
    plan = small.cache.stores.begin(keys_of(small, numbered(16)))
    small.cache.stores.commit(plan)
    for end in (small.cache.stores.commit, small.cache.stores.abandon):
        with pytest.raises(KeyError):
            end(plan)
    hit = lookup(small, numbered(16))
    small.cache.release(hit)
    with pytest.raises(KeyError):
        small.cache.release(hit)
    small.cache.check_integrity()


def test_flush_forgets_all_but_overwrites_nothing_that_is_read(make_cache):
    small = make_cache(num_pages=8)
    small.store(numbered(16))
    hit = lookup(small, numbered(16))
    running = small.cache.stores.begin(keys_of(small, numbered(8, 100)))
    small.cache.flush()
    assert small.hit(numbered(16)) == 0
    small.store(numbered(32, 200))
    late = lookup(small, numbered(32, 200))
    assert not set(late.host_pages.tolist()) & set(hit.host_pages.tolist())
    small.cache.stores.commit(running)
    assert small.hit(numbered(8, 100)) == 0
    small.cache.release(hit)
    small.cache.release(late)
    small.cache.check_integrity()
    small.restart()
    assert small.hit(numbered(16)) == 0


# ---- what people see ------------------------------------------------------------------------------


def test_stats_count_what_happened(make_cache):
    small = make_cache(num_pages=50, num_states=9)
    small.store(numbered(24), anchors=(8,))
    small.hit(numbered(24))
    small.hit(numbered(24, 100))
    small.hit(numbered(5))
    stats = small.cache.stats()
    assert (stats.pages_used, stats.pages_free, stats.states_used) == (2, 48, 1)
    counts = stats.counts
    assert (counts.lookups, counts.hits, counts.queried_tokens, counts.hit_tokens) == (3, 1, 53, 8)
    assert counts.misses == {MissReason.NO_PREFIX: 1, MissReason.TOO_SHORT: 1}
    assert (counts.stored_pages, counts.stored_states) == (2, 1)


def test_a_snapshot_stays_as_it_was(make_cache):
    small = make_cache(num_pages=50)
    before = small.cache.stats()
    small.hit(numbered(24))
    assert before.counts.lookups == 0 and before.counts.misses == {}


def test_tokens_lost_for_want_of_a_state_are_counted_and_explained(make_cache):
    small = make_cache(num_pages=50, num_states=9)
    small.store(numbered(24), anchors=(8, 24))
    small.clock.now += 10_000_000_000
    small.hit(numbered(20))
    small.hit(numbered(40, 100))
    small.clock.now += 5_000_000_000
    counts = small.cache.stats().counts
    assert (counts.capped_by_state, counts.capped_tokens) == (1, 8)
    newest, older = small.cache.recent_misses()
    assert newest.reason == MissReason.NO_PREFIX and newest.prompt_tokens == 40
    assert (older.reason, older.hit_tokens, older.matched_tokens) == (MissReason.NO_STATE, 8, 16)
    assert round(older.seconds_ago) == 5


def test_prompts_too_short_for_a_hit_leave_the_list_of_misses_to_those_that_tell_something(
    make_cache,
):
    small = make_cache(num_pages=50)
    lookup(small, numbered(40), request_id="long")
    for length in range(1, 7):
        for _ in range(20):
            lookup(small, numbered(length), request_id="short")
    assert [miss.request_id for miss in small.cache.recent_misses()] == ["long"]
    assert small.cache.stats().counts.misses[MissReason.TOO_SHORT] == 120


def test_top_prefixes_are_those_that_saved_most(make_cache):
    small = make_cache(num_pages=50)
    small.store([*numbered(8), *numbered(8, 100)])
    small.store([*numbered(8), *numbered(8, 200)])
    small.store(numbered(4, 300))
    for _ in range(3):
        small.hit([*numbered(8), *numbered(12, 100)])
    for _ in range(2):
        small.hit([*numbered(8), *numbered(12, 200)])
    small.hit(numbered(8, 300))
    top = small.cache.top_prefixes(10)
    assert [(prefix.tokens, prefix.hits) for prefix in top] == [
        (16, 3),
        (8, 5),
        (16, 2),
        (4, 1),
    ]
    assert small.cache.top_prefixes(1) == top[:1]


def test_the_age_of_the_oldest_page(make_cache):
    small = make_cache(num_pages=50)
    assert small.cache.stats().oldest_page_seconds == 0
    small.clock.now = 7_000_000_000
    small.store(numbered(8))
    small.clock.now = 9_000_000_000
    small.store(numbered(8, 100))
    small.clock.now = 10_000_000_000
    assert round(small.cache.stats().oldest_page_seconds) == 3
    small.hit(numbered(11))
    assert round(small.cache.stats().oldest_page_seconds) == 1


# ---- slots ----------------------------------------------------------------------------------------


def test_rows_of_a_prompt_stay_together_in_a_pool_that_has_long_been_full(make_cache):
    small = make_cache(num_pages=2560)
    rng = random.Random(5)
    conversations = [[n, rng.randrange(40, 400)] for n in range(60)]
    pages = runs = 0
    for turn in range(2500):
        conversation = rng.choice(conversations)
        tokens = [conversation[0], *range(conversation[1])]
        plan = small.cache.stores.begin(keys_of(small, tokens))
        if plan is not None:
            if turn > 1500:
                pages += len(plan.host_pages)
                runs += 1 + int(np.count_nonzero(np.diff(plan.host_pages) != 1))
            small.cache.stores.commit(plan)
        conversation[1] += rng.randrange(10, 60)
        if conversation[1] > 600:
            conversation[:] = [rng.randrange(1 << 30), rng.randrange(40, 400)]
    stats = small.cache.stats()
    assert stats.counts.evicted_pages > 10_000
    assert stats.pages_used > 0.95 * stats.num_pages
    assert pages / runs > 10


def publish(headers, row: int, key: bytes, parent: bytes, depth: int) -> None:
    rows = np.array([row], np.int32)
    headers.begin_write(rows)
    headers.publish(rows, [key], [parent], np.array([depth], np.uint32), 5)


def test_rows_that_do_not_lie_where_they_say_are_not_recovered(make_cache):
    """A page one deeper than its parent, and a state as deep as its page: else a prefix would be served
    with a hole in it."""
    small = make_cache(num_pages=6, num_states=3)
    first, second, third, none = b"a" * 16, b"b" * 16, b"c" * 16, bytes(16)
    publish(small.pool.page_headers, 0, first, none, 0)
    publish(small.pool.page_headers, 1, second, first, 1)
    publish(small.pool.page_headers, 2, third, first, 2)
    publish(small.pool.state_headers, 0, first, none, 1)
    publish(small.pool.state_headers, 1, second, none, 1)
    small.restart()
    stats = small.cache.stats()
    assert (stats.pages_used, stats.states_used) == (2, 1)
    small.cache.check_integrity()
