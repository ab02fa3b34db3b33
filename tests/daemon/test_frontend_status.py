"""Whether every frontend acts on the present status: not on one like it, or on an old one."""

from __future__ import annotations

import pytest

from daemon.instance.frontend_status import CONFIRM_SECONDS, FrontendStatus
from transport.messages.from_daemon import InstanceStatus

A, B = "frontend/0", "frontend/1"


class Line:
    """The way to the frontends."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str, int]] = []
        self.full = False

    def send(self, name: str, status: InstanceStatus) -> bool:
        if not self.full:
            self.sent.append((name, status.state, status.serial))
        return not self.full


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture
def status(line) -> FrontendStatus:
    status = FrontendStatus(line.send, InstanceStatus("starting", "", 1), 0.0)
    status.joined(A)
    status.joined(B)
    return status


@pytest.fixture
def frontends(make_child):
    return [make_child(name=name, state="ready") for name in (A, B)]


def test_all_have_to_confirm(status, line, frontends):
    assert status.change("ready", "", 1.0)
    status.deliver(frontends)
    assert line.sent == [(A, "ready", 2), (B, "ready", 2)]
    status.held(A, 2)
    assert status.unconfirmed(frontends) == [B]
    assert not status.all_hold(frontends, 1.0)
    status.held(B, 2)
    assert status.all_hold(frontends, 1.0)


def test_a_state_that_comes_back_has_to_be_confirmed_again(status, frontends):
    status.change("ready", "", 1.0)
    status.deliver(frontends)
    status.change("degraded", "worker/0: ...", 2.0)
    status.deliver(frontends)
    status.change("ready", "", 3.0)
    status.deliver(frontends)
    for name in (A, B):
        status.held(name, 2)  # late: of the first time
    assert status.unconfirmed(frontends) == [A, B]
    for name in (A, B):
        status.held(name, 4)
    assert status.all_hold(frontends, 3.0)


def test_what_is_so_already_is_not_told_again(status, line, frontends):
    status.deliver(frontends)
    assert not status.change("starting", "", 5.0)
    status.deliver(frontends)
    assert len(line.sent) == 2
    assert status.changed_at == 0.0


def test_one_that_does_not_read_is_told_later(status, line, frontends):
    line.full = True
    status.change("ready", "", 1.0)
    status.deliver(frontends)
    line.full = False
    status.deliver(frontends)
    status.deliver(frontends)
    assert line.sent == [(A, "ready", 2), (B, "ready", 2)]


def test_a_new_process_is_told_when_it_has_said_hello_and_confirms_for_itself(
    status, line, frontends
):
    status.change("ready", "", 1.0)
    status.deliver(frontends)
    status.held(A, 2)
    status.held(B, 2)
    status.change("degraded", "frontend/1: ended", 2.0)
    frontends[1].state = None
    status.deliver(frontends)
    assert line.sent[2:] == [(A, "degraded", 3)]
    status.joined(B)
    frontends[1].state = "ready"
    status.change("ready", "", 3.0)
    status.deliver(frontends)
    assert line.sent[3:] == [(A, "ready", 4), (B, "ready", 4)]
    status.held(A, 4)
    assert status.unconfirmed(frontends) == [B]


def test_a_dead_one_is_not_waited_for(status, frontends):
    status.change("ready", "", 1.0)
    status.held(A, 2)
    frontends[1].process = None
    assert status.all_hold(frontends, 1.0)


def test_time_runs_from_the_change(status, frontends, caplog):
    status.change("ready", "", 1000.0)
    status.held(B, 2)
    assert not status.all_hold(frontends, 1000.0 + CONFIRM_SECONDS - 1)
    assert caplog.messages == []
    assert status.all_hold(frontends, 1000.0 + CONFIRM_SECONDS)
    assert caplog.messages == [
        f"{A}: no sign within {CONFIRM_SECONDS:g} s of having read that the instance is ready"
    ]
