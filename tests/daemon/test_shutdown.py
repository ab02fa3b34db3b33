"""Each step of a stop comes when it is due: not before, and not later than its limit."""

from __future__ import annotations

import pytest

from daemon.errors import DeepInferError
from daemon.instance.phase import Event, Lifecycle, Phase
from daemon.instance.shutdown import KILL_SECONDS, TERMINATE_SECONDS, Shutdown
from transport.messages.telemetry import RequestRow, Snapshot, StageTimes

NAMES = ("router", "worker/0", "frontend/0")


class Group:
    """Stands for the supervisor of children that end only when a test says so."""

    def __init__(self, make_child) -> None:
        self.children = {name: make_child(name=name, state="ready") for name in NAMES}
        self.signals: list[str] = []

    def by_role(self, role: str) -> list:
        return [child for child in self.children.values() if child.spec.role == role]

    def terminate(self, role: str | None = None) -> None:
        self.signals.append(f"TERM {role or 'all'}")

    def kill(self) -> None:
        self.signals.append("KILL")

    def end(self, name: str) -> None:
        self.children[name].process = None


@pytest.fixture
def group(make_child):
    return Group(make_child)


@pytest.fixture
def lifecycle():
    return Lifecycle(0.0)


@pytest.fixture
def told():
    return []


@pytest.fixture
def shutdown(group, lifecycle, told):
    def send(name, message) -> bool:
        told.append((name, type(message).__name__))
        return True

    return Shutdown(lifecycle, group, send)


@pytest.fixture
def serving(shutdown, lifecycle):
    """A shutdown of an instance that serves, and gets 30 s for its requests at time 100."""
    lifecycle.take(Event.ALL_READY, 1.0)
    lifecycle.take(Event.CONFIRMED, 1.0)
    assert shutdown.begin(30.0, 100.0)
    return shutdown


def router_snapshot(*requests: RequestRow) -> Snapshot:
    return Snapshot("router", 1, "ready", "", 1, requests=list(requests))


def request() -> RequestRow:
    return RequestRow("r", "running", "frontend/0", 0, 1, 3, 1, StageTimes(1.0))


def test_who_takes_requests_is_told_at_once(serving, told, shutdown):
    assert told == [("router", "Drain"), ("frontend/0", "Drain")]
    assert not shutdown.begin(5.0, 101.0)
    assert len(told) == 2


def test_an_idle_instance_ends_before_its_time(serving, group, lifecycle):
    serving.router_told(router_snapshot())
    serving.go_on(101.0)
    assert group.signals == []  # it may have been on its way when the drain began
    serving.router_told(router_snapshot(request()))
    serving.go_on(101.0)
    assert group.signals == []
    serving.router_told(router_snapshot())
    serving.go_on(102.0)
    assert group.signals == ["TERM frontend"]
    group.end("frontend/0")
    serving.go_on(102.5)
    assert group.signals == ["TERM frontend", "TERM all"]
    assert lifecycle.phase is Phase.TERMINATING


def test_requests_get_their_time_and_no_more(serving, group):
    serving.go_on(129.9)
    assert group.signals == []
    serving.go_on(130.0)
    assert group.signals == ["TERM frontend"]
    serving.go_on(130.0 + TERMINATE_SECONDS)
    assert group.signals == ["TERM frontend"]
    serving.go_on(130.1 + TERMINATE_SECONDS)
    assert group.signals == ["TERM frontend", "TERM all"]


def test_hurry_ends_the_wait(serving, group):
    serving.hurry(101.0)
    serving.go_on(101.0)
    assert group.signals == ["TERM frontend"]


def test_without_a_router_nothing_is_waited_for(serving, group):
    group.end("router")
    group.end("frontend/0")
    serving.go_on(100.0)
    assert group.signals == ["TERM frontend", "TERM all"]


def test_what_never_served_has_nothing_to_drain(shutdown, group, lifecycle):
    assert shutdown.begin(30.0, 5.0)
    shutdown.go_on(5.0)
    assert group.signals == ["TERM frontend"]


def test_what_ignores_both_signals_is_killed_and_then_named(serving, group):
    group.end("frontend/0")
    serving.go_on(130.0)
    serving.go_on(130.1 + TERMINATE_SECONDS)
    assert group.signals[-1] == "KILL"
    killed = 130.1 + TERMINATE_SECONDS
    serving.go_on(killed + KILL_SECONDS)
    with pytest.raises(DeepInferError, match="do not end: router, worker/0"):
        serving.go_on(killed + KILL_SECONDS + 0.1)
    assert group.signals.count("KILL") == 1


def test_impatience_kills_at_once_but_only_what_is_being_stopped(shutdown, group):
    shutdown.kill(1.0)
    assert group.signals == []
    shutdown.begin(30.0, 2.0)
    shutdown.kill(3.0)
    shutdown.kill(4.0)
    assert group.signals == ["KILL"]
