"""The allocator of slots: nothing handed out twice, nothing lost, runs kept whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.pool.run_allocator import RunAllocator


def num_runs(slots: np.ndarray) -> int:
    return int(np.count_nonzero(np.diff(slots) != 1)) + 1


@given(st.data(), st.integers(0, 60))
def test_any_traffic(data, count):
    taken_before = data.draw(st.sets(st.integers(0, count - 1))) if count else set()
    allocator = RunAllocator(count, taken_before)
    owned = sorted(taken_before)
    for _ in range(data.draw(st.integers(0, 25))):
        allocator.check_integrity(owned)
        assert allocator.num_free == count - len(owned)
        if data.draw(st.booleans()):
            wanted = data.draw(st.integers(0, count))
            if wanted > allocator.num_free:
                with pytest.raises(IndexError):
                    allocator.take(wanted)
                continue
            slots = allocator.take(wanted).tolist()
            assert len(slots) == wanted and not set(slots) & set(owned)
            owned += slots
        elif owned:
            back = data.draw(st.lists(st.sampled_from(owned), unique=True))
            allocator.give_back(np.array(back, np.int32))
            owned = [slot for slot in owned if slot not in back]
    allocator.check_integrity(owned)


def test_a_fresh_pool_gives_one_run():
    allocator = RunAllocator(1000)
    assert allocator.take(400).tolist() == list(range(400))
    assert num_runs(allocator.take(600)) == 1


def test_neighbours_that_come_back_one_by_one_are_one_run_again():
    allocator = RunAllocator(64)
    slots = allocator.take(64)
    for slot in np.random.default_rng(1).permutation(slots):
        allocator.give_back(np.array([slot], np.int32))
    assert num_runs(allocator.take(64)) == 1


def test_a_request_gets_a_run_that_holds_it_though_shorter_ones_are_free():
    allocator = RunAllocator(100)
    allocator.take(100)
    for first, size in ((0, 3), (10, 3), (20, 30), (60, 3)):
        allocator.give_back(np.arange(first, first + size, dtype=np.int32))
    assert num_runs(allocator.take(16)) == 1
    assert num_runs(allocator.take(17)) == 2, "14 and one of the runs of 3"


def test_giving_back_twice_is_an_error():
    allocator = RunAllocator(4)
    slots = allocator.take(2)
    allocator.give_back(slots)
    with pytest.raises(KeyError):
        allocator.give_back(slots)
    with pytest.raises(KeyError):
        allocator.give_back(np.array([allocator.take(1)[0]] * 2, np.int32))
