"""What goes first when the pool is full. Pages of 4 tokens; prompts are named by their pages."""

from __future__ import annotations

import numpy as np
import pytest

from hicache.cache.index import PrefixIndex


def prompt(pages: str) -> list[int]:
    """`"aab"`: three pages, and three more tokens so that all pages can be hit."""
    return [token for page in pages for token in (ord(page), 1, 2, 3)] + [7, 7, 7]


def test_the_prefix_that_was_not_used_for_longest_goes_first(make_cache):
    small = make_cache(num_pages=6)
    for name in ("aa", "bb", "cc"):
        small.store(prompt(name))
    small.hit(prompt("aa"))
    small.store(prompt("dd"))
    assert [small.hit(prompt(name)) for name in ("aa", "bb", "cc", "dd")] == [8, 0, 8, 8]


def test_a_prefix_is_eaten_from_its_end(make_cache):
    small = make_cache(num_pages=6)
    small.store(prompt("abcd"))
    small.store(prompt("x"))
    small.store(prompt("y"))
    small.store(prompt("z"))
    assert small.hit(prompt("abcd")) == 12
    assert small.cache.stats().counts.evicted_pages == 1


def test_a_shared_beginning_outlives_its_branches(make_cache):
    small = make_cache(num_pages=6)
    small.store(prompt("sab"))
    small.store(prompt("scd"))
    small.store(prompt("xyz"))
    assert small.hit(prompt("sab")) == 4, "only the shared page is left of the older one"
    assert small.hit(prompt("scd")) == 12
    assert small.hit(prompt("xyz")) == 12


def test_a_hit_keeps_its_prefix_until_it_is_released(make_cache):
    small = make_cache(num_pages=4)
    small.store(prompt("abcd"))
    hit = small.cache.lookup(small.cache.keys(np.array(prompt("abc"), np.int32)))
    small.store(prompt("wxyz"))
    assert small.hit(prompt("wxyz")) == 4, "there was one page to have"
    assert small.hit(prompt("abc")) == 12
    small.cache.release(hit)
    small.store(prompt("wxyz"))
    assert small.hit(prompt("wxyz")) == 16
    assert small.hit(prompt("abc")) == 0


def test_pages_past_the_last_state_go_before_pages_that_a_hit_can_use():
    """However late they were used: a hit must end at a state."""
    index = PrefixIndex(num_pages=9, num_states=9)
    for page, (name, parent) in enumerate([("a", -1), ("aa", 0), ("b", -1), ("bb", 2), ("bbb", 3)]):
        index.insert_page(name.encode(), parent, page, stamp=page)
    index.insert_state(page=1, state=5, stamp=1)
    index.insert_state(page=2, state=6, stamp=2)
    order = [index.evict_page() for _ in range(5)]
    assert [evicted.page for evicted in order] == [4, 3, 1, 0, 2]
    assert [evicted.state for evicted in order] == [-1, -1, 5, -1, 6]
    with pytest.raises(IndexError):
        index.evict_page()


def test_states_that_a_longer_prefix_supersedes_go_first(make_cache):
    """Though they were used last: turn 2 of the conversation needs the state of turn 1 no more."""
    small = make_cache(num_pages=40, num_states=3)
    small.store(prompt("old"), anchors=(12,))
    small.store(prompt("abcd"), anchors=(8, 16))
    assert small.hit(prompt("ab")) == 8
    small.store(prompt("new"), anchors=(12,))
    assert small.hit(prompt("ab")) == 0, "superseded by the state at 16"
    assert small.hit(prompt("abcd")) == 16
    assert small.hit(prompt("old")) == 12
    assert small.hit(prompt("new")) == 12


def test_a_state_where_conversations_part_is_not_superseded(make_cache):
    small = make_cache(num_pages=40, num_states=4)
    small.store(prompt("s"), anchors=(4,))
    small.store(prompt("sa"), anchors=(8,))
    small.store(prompt("sb"), anchors=(8,))
    small.store(prompt("x"), anchors=(4,))
    small.hit(prompt("sb"))
    small.hit(prompt("s"))
    small.store(prompt("y"), anchors=(4,))
    assert small.hit(prompt("sa")) == 4, "its own state was the oldest; the shared one serves it"
    assert small.hit(prompt("sb")) == 8
    assert small.hit(prompt("x")) == 4


def test_among_last_states_the_oldest_goes_first(make_cache):
    small = make_cache(num_pages=40, num_states=3)
    for name in ("a", "b", "c"):
        small.store(prompt(name), anchors=(4,))
    small.hit(prompt("a"))
    small.store(prompt("d"), anchors=(4,))
    assert [small.hit(prompt(name)) for name in "abcd"] == [4, 0, 4, 4]


def test_a_page_takes_its_state_along(make_cache):
    small = make_cache(num_pages=2, num_states=8)
    small.store(prompt("ab"), anchors=(8,))
    small.store(prompt("c"), anchors=(4,))
    stats = small.cache.stats()
    assert (stats.pages_used, stats.states_used) == (2, 1)
    assert stats.counts.evicted_states == 1


def test_a_restarted_process_remembers_which_state_was_used_last(make_cache):
    small = make_cache(num_pages=40, num_states=3)
    small.clock.now = 1000
    for name in ("a", "b", "c"):
        small.store(prompt(name), anchors=(4,))
    small.hit(prompt("a"))
    small.restart()
    small.store(prompt("d"), anchors=(4,))
    assert [small.hit(prompt(name)) for name in "abcd"] == [4, 0, 4, 4]


def test_a_use_is_later_than_all_before_though_the_clock_starts_anew(make_cache):
    """As after a reboot that a pool outlives: what is used now is not the oldest."""
    small = make_cache(num_pages=6)
    small.clock.now = 1000
    for name in ("aa", "bb", "cc"):
        small.store(prompt(name))
    small.clock.now = 0
    small.restart()
    small.hit(prompt("aa"))
    small.store(prompt("dd"))
    assert [small.hit(prompt(name)) for name in ("aa", "bb", "cc", "dd")] == [8, 0, 8, 8]


def test_a_restarted_process_remembers_what_was_used_last(make_cache):
    small = make_cache(num_pages=6)
    small.clock.now = 1000
    for name in ("aa", "bb", "cc"):
        small.store(prompt(name))
    small.hit(prompt("aa"))
    small.restart()
    small.store(prompt("dd"))
    assert [small.hit(prompt(name)) for name in ("aa", "bb", "cc", "dd")] == [8, 0, 8, 8]
