"""Which tokenizer and which rank a request goes to: pure choices over names and loads."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import TypeVar

from daemon.router.settings import Routing
from transport.ids import DpRank, ProcessName

LOAD_FACTOR = 2.0
"""A rank past this multiple of the others' mean load is left for the least loaded one."""
LOAD_ALLOWANCE = 4
"""Choices that a rank may be above that whatever the factor: small loads are no skew."""

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


def choose_tokenizer(affinity: str, loads: Mapping[ProcessName, int]) -> ProcessName:
    """The same conversation goes to the same process, whose caches know it; others to the idlest."""
    return preferred(affinity, loads) if affinity else least_loaded(loads)


def choose_rank(
    routing: Routing, affinity: str, loads: Mapping[DpRank, int]
) -> tuple[DpRank, bool]:
    """Rank for a request, and whether its preferred rank was passed over for being overloaded."""
    if routing == "least-loaded" or not affinity:
        return least_loaded(loads), False
    rank = preferred(affinity, loads)
    # Of the others: with its own load in the mean, one of two ranks could never be past twice of it.
    others = sum(loads.values()) - loads[rank]
    if loads[rank] > LOAD_FACTOR * others / max(len(loads) - 1, 1) + LOAD_ALLOWANCE:
        least = least_loaded(loads)
        return least, least != rank
    return rank, False
