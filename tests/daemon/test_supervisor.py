"""When the supervisor starts a lost child again. The clock and the processes are fabricated."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest

import daemon.supervision.supervisor
from daemon.supervision.child_output import ChildOutput
from daemon.supervision.child_process import ChildSpec
from daemon.supervision.restart_policy import FIRST_DELAY_SECONDS, HEALTHY_SECONDS
from daemon.supervision.supervisor import Supervisor
from transport.ids import ProcessName


class FakeProcess:
    """Ends when told to."""

    process_group = pid = 4711

    def __init__(self, spec, group, output) -> None:
        self.code: int | None = None

    def reap(self) -> int | None:
        return self.code

    def close(self) -> None:
        pass


class Bench:
    """One child and the time."""

    def __init__(self, monkeypatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(daemon.supervision.supervisor, "ChildProcess", FakeProcess)
        monkeypatch.setattr(
            daemon.supervision.supervisor, "time", SimpleNamespace(monotonic=lambda: self.now)
        )
        name = ProcessName("worker/0")
        specs = [ChildSpec(name, "worker", "none", b"{}")]
        self.supervisor = Supervisor(specs, lambda pids: None, ChildOutput(lambda data: None))
        self.child = self.supervisor.children[name]
        self.supervisor.start_all()

    def live(self, loading: float, serving: float, hanging: float = 0.0) -> float:
        """One life and death; returns the seconds until the next life."""
        self.now += loading
        if serving:
            self.child.state, self.child.served_from = "ready", self.now
            self.now += serving
            self.child.progress_at = self.now
        self.now += hanging
        self.child.process.code = -signal.SIGKILL
        (death,) = self.supervisor.collect_deaths(self.now, give_up_on_loops=False)
        assert death.child is self.child
        waited = self.child.restart_at - self.now
        assert self.supervisor.next_restart() == self.child.restart_at
        self.now = self.child.restart_at
        self.supervisor.restart_due(self.now)
        assert self.child.alive
        assert self.supervisor.next_restart() is None
        return waited


@pytest.fixture
def bench(monkeypatch) -> Bench:
    return Bench(monkeypatch)


def test_a_child_that_is_killed_every_minute_is_replaced_at_once_each_time(bench):
    assert [bench.live(loading=5.0, serving=55.0) for _ in range(20)] == [0.0] * 20


def test_a_child_that_loads_for_minutes_and_never_serves_backs_off(bench):
    waits = [bench.live(loading=120.0, serving=0.0) for _ in range(3)]
    assert waits == pytest.approx([FIRST_DELAY_SECONDS * 2**n for n in range(3)])


def test_a_child_that_hangs_as_soon_as_it_serves_backs_off_however_long_it_hung(bench):
    waits = [bench.live(loading=1.0, serving=0.2, hanging=120.0) for _ in range(3)]
    assert waits == pytest.approx([FIRST_DELAY_SECONDS * 2**n for n in range(3)])


def test_what_a_child_did_before_its_death_does_not_count_for_its_successor(bench):
    assert bench.live(loading=1.0, serving=HEALTHY_SECONDS) == 0.0
    assert bench.live(loading=1.0, serving=0.0) == pytest.approx(FIRST_DELAY_SECONDS)
