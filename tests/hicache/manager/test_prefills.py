"""Prompts that arrive together: what is being computed is announced to those that begin alike."""

from __future__ import annotations

import numpy as np

from hicache.keys import PromptKeys
from hicache.manager.prefills import Prefills
from hicache.manager.ticket import PrefixTicket
from transport.ids import RequestId


def leader() -> PrefixTicket:
    return PrefixTicket(RequestId("leader"), 0)


def numbered(count: int) -> list[int]:
    return list(range(count))


def keys_of(small, tokens: list[int], salt: str = "") -> PromptKeys:
    return small.cache.keys(np.array(tokens, np.int32), salt)


def longest_announced(small, prefills, tokens: list[int], salt: str = "") -> int:
    """Tokens of the longest hit that announced prefills will make possible."""
    hits = prefills.announced(keys_of(small, tokens, salt))
    return next((num_tokens for num_tokens, _ in hits), 0)


def test_an_announced_prefill_tells_others_what_they_can_wait_for(make_cache):
    small = make_cache(num_pages=50)
    prefills = Prefills(small.cache)
    first = prefills.open(leader(), keys_of(small, numbered(20)))
    again = prefills.open(leader(), keys_of(small, numbered(12)))
    assert longest_announced(small, prefills, numbered(20)) == 16
    assert longest_announced(small, prefills, numbered(60)) == 20
    assert longest_announced(small, prefills, [*numbered(9), 0, 0, 0, 0]) == 8
    assert longest_announced(small, prefills, numbered(20), "tenant") == 0
    longest, *shorter = prefills.announced(keys_of(small, numbered(13)))
    assert longest == (8, first) and (8, again) in shorter, "all who announce it, longest first"
    prefills.close(first)
    prefills.close(first)
    assert not prefills.is_open(first) and prefills.is_open(again)
    assert longest_announced(small, prefills, numbered(60)) == 12
    prefills.close(again)
    assert longest_announced(small, prefills, numbered(60)) == 0
    prefills.check_integrity([])


def test_with_states_only_the_anchors_can_be_waited_for(make_cache):
    small = make_cache(num_pages=50, num_states=9)
    prefills = Prefills(small.cache)
    announcement = prefills.open(leader(), keys_of(small, numbered(21)))
    assert longest_announced(small, prefills, numbered(21)) == 16
    assert longest_announced(small, prefills, numbered(60)) == 20
    assert longest_announced(small, prefills, numbered(12)) == 0
    promised = longest_announced(small, prefills, numbered(60))
    small.store(numbered(21))
    prefills.close(announcement)
    assert small.hit(numbered(60)) == promised
