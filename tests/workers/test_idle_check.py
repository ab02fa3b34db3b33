"""Checks run once a pause, and the longer they take, the longer a pause must be."""

import pytest

from workers.idle_check import PATIENCE, IdleCheck


class World:
    """A clock, and a check that takes `cost` seconds of it."""

    def __init__(self, cost: float) -> None:
        self.now = 100.0
        self.cost = cost
        self.checks = 0
        self.idle = IdleCheck([self.check], lambda: self.now)

    def check(self) -> None:
        self.checks += 1
        self.now += self.cost

    def pass_quietly(self, seconds: float) -> None:
        self.now += seconds
        self.idle.quiet()


def test_a_check_comes_once_a_pause():
    world = World(cost=0.001)
    for pause in (1, 2, 3):
        world.pass_quietly(0.5)
        world.pass_quietly(0.5)
        assert world.checks == pause
        world.idle.busy()


def test_a_long_check_waits_for_a_long_pause():
    world = World(cost=1.5)
    world.pass_quietly(0.5)
    assert world.checks == 1
    world.idle.busy()
    for _ in range(PATIENCE):
        world.pass_quietly(1.4)
    assert world.checks == 1
    world.pass_quietly(PATIENCE * 0.11)
    assert world.checks == 2
    world.pass_quietly(10_000)
    assert world.checks == 2


def test_a_failure_is_not_kept_quiet():
    def fail() -> None:
        raise AssertionError("a page is lost")

    with pytest.raises(AssertionError, match="a page is lost"):
        IdleCheck([fail]).quiet()
