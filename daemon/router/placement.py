"""Which tokenizer and which rank a request goes to: pure choices over names and loads."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import TypeVar

from transport.ids import DpRank, ProcessName

LOAD_FACTOR = 2.0
"""A place past this multiple of the others' mean load is left for the least loaded one."""
LOAD_ALLOWANCE = 4
"""Choices or prompts that a place may be above that whatever the factor: small loads are no skew."""

PlaceT = TypeVar("PlaceT", ProcessName, DpRank)


def least_loaded(loads: Mapping[PlaceT, int]) -> PlaceT:
    """The place with the smallest load; among equals the first in order."""
    return min(loads, key=lambda place: (loads[place], place))


def preferred(key: str, places: Mapping[PlaceT, int]) -> PlaceT:
    """The place that `key` prefers: highest-random-weight hashing (Thaler and Ravishankar), so that
    a place that comes or goes moves only its own keys."""
    return max(
        places,
        key=lambda place: blake2b(f"{place}\0{key}".encode(), digest_size=8).digest(),
    )


def choose(affinity: str, loads: Mapping[PlaceT, int]) -> tuple[PlaceT, bool]:
    """The place that `affinity` prefers, or the least loaded one where that is overloaded (then also
    True) or there is no affinity."""
    if not affinity:
        return least_loaded(loads), False
    place = preferred(affinity, loads)
    # Of the others: with its own load in the mean, one of two places could never be past twice of it.
    others = sum(loads.values()) - loads[place]
    if loads[place] > LOAD_FACTOR * others / max(len(loads) - 1, 1) + LOAD_ALLOWANCE:
        least = least_loaded(loads)
        return least, least != place
    return place, False
