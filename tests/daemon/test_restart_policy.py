"""Back-off of a child that keeps dying."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from daemon.supervision.restart_policy import (
    DEATHS_AT_START,
    FIRST_DELAY_SECONDS,
    HEALTHY_SECONDS,
    MAX_DELAY_SECONDS,
    RestartPolicy,
)


def test_the_delay_doubles_to_a_limit():
    policy = RestartPolicy()
    delays = [policy.died(0.0) for _ in range(2000)]
    assert delays[:4] == [0.1, 0.2, 0.4, 0.8]
    assert delays[-1] == MAX_DELAY_SECONDS


def test_after_a_healthy_life_the_next_one_begins_at_once():
    policy = RestartPolicy()
    assert policy.died(HEALTHY_SECONDS) == 0.0
    for _ in range(5):
        policy.died(1.0)
    assert policy.died(HEALTHY_SECONDS) == 0.0
    assert policy.died(1.0) == FIRST_DELAY_SECONDS


@given(st.lists(st.floats(0, 2 * HEALTHY_SECONDS)))
def test_delays_are_bounded_and_grow_while_it_dies_young(lives):
    policy = RestartPolicy()
    before = 0.0
    for served in lives:
        delay = policy.died(served)
        if served >= HEALTHY_SECONDS:
            assert delay == 0.0
        else:
            assert max(before, FIRST_DELAY_SECONDS) <= delay <= MAX_DELAY_SECONDS
        before = delay


def test_a_loop_is_a_few_deaths_in_a_row():
    policy = RestartPolicy()
    for _ in range(DEATHS_AT_START - 1):
        policy.died(1.0)
        assert not policy.looping_at_start
    policy.died(1.0)
    assert policy.looping_at_start
