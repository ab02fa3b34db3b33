"""Merged runs copy exactly the wanted pairs, in as few pieces as there can be."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hicache.copies.runs import merge_runs

PAIRS = st.integers(0, 30).flatmap(
    lambda n: st.tuples(st.permutations(range(31)), st.permutations(range(31))).map(
        lambda both: list(zip(both[0][:n], both[1][:n], strict=True))
    )
)


def runs_of(pairs: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    device = np.array([d for d, _ in pairs], np.int32)
    host = np.array([h for _, h in pairs], np.int32)
    return [(int(d), int(h), int(n)) for d, h, n in zip(*merge_runs(device, host), strict=True)]


@given(PAIRS)
def test_runs_are_the_pairs(pairs):
    covered = [(d + i, h + i) for d, h, n in runs_of(pairs) for i in range(n)]
    assert sorted(covered) == sorted(pairs)


@given(PAIRS)
def test_no_two_runs_could_be_one(pairs):
    runs = runs_of(pairs)
    assert all(n > 0 for _, _, n in runs)
    ends = {(d + n, h + n) for d, h, n in runs}
    assert not ends & {(d, h) for d, h, _ in runs}


def test_order_of_the_pairs_does_not_matter():
    assert runs_of([(5, 12), (3, 10), (4, 11), (9, 1), (6, 13)]) == [(3, 10, 4), (9, 1, 1)]
