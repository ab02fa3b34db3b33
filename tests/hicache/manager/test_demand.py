"""Where prompts that wait part from each other."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.manager.demand import PrefixDemand

CHAIN = [bytes([at]) for at in range(60)]


def demand_of(lengths: list[int]) -> PrefixDemand:
    """Prompts that go along the chain for so many pages and then leave it."""
    demand = PrefixDemand()
    for number, length in enumerate(lengths):
        demand.add([*CHAIN[:length], *(b"%d %d" % (number, at) for at in range(3))])
    return demand


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(0, 55))
def test_the_best_end_saves_most(lengths, first):
    saved = {
        end: sum(length >= end for length in lengths) * (end - first)
        for end in set(lengths)
        if end > first
    }
    end = demand_of(lengths).best_end(CHAIN, first)
    assert saved.get(end, 0) == max(saved.values(), default=0)
    assert end in saved or not saved


def test_prompts_that_stay_to_the_end_of_a_chain_want_no_end_within_it():
    assert demand_of([50]).best_end(CHAIN[:10], 0) == 0
    assert demand_of([50, 5, 5]).best_end(CHAIN[:10], 0) == 5


def test_prompts_that_each_part_elsewhere_get_few_ends():
    demand = demand_of(list(range(1, 59)))
    ends = [0]
    while (end := demand.best_end(CHAIN, ends[-1])) > 0:
        ends.append(end)
    assert len(ends) - 1 <= math.ceil(math.log2(58)), ends


def test_demand_that_is_gone_is_forgotten():
    demand, rng = PrefixDemand(), random.Random(3)
    chains = [tuple(CHAIN[: rng.randrange(20)]) for _ in range(20)]
    for chain in chains:
        demand.add(chain)
    demand.check_integrity(chains)
    for chain in chains:
        demand.remove(chain)
    demand.check_integrity([])
    with pytest.raises(AssertionError):
        demand.check_integrity([tuple(CHAIN[:2])])
