"""When the supervisor starts a lost child again. The clock and the processes are fabricated."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

import daemon.supervision.supervisor
from daemon.supervision import memory_watch
from daemon.supervision.child_output import ChildOutput
from daemon.supervision.child_process import ChildProcess, ChildSpec
from daemon.supervision.restart_policy import FIRST_DELAY_SECONDS, HEALTHY_SECONDS
from daemon.supervision.supervisor import Supervisor
from tests.support.waiting import eventually
from transport.child import EXIT_FATAL
from transport.ids import ProcessName
from workers.hardware.host_memory import OomKills


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


def test_a_child_that_says_by_its_exit_code_that_a_restart_is_in_vain_is_not_started_again(bench):
    bench.child.process.code = EXIT_FATAL
    (death,) = bench.supervisor.collect_deaths(bench.now, give_up_on_loops=False)
    assert death.hopeless
    assert "exit code 78" in death.reason
    assert bench.child.is_given_up
    assert bench.supervisor.next_restart() is None


NOT_FOR_CHILDREN = {
    "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "PYTHONOPTIMIZE",
}  # fmt: skip


def test_what_is_meant_for_the_daemon_is_not_for_its_children(monkeypatch, tmp_path):
    told = tmp_path / "told"
    (tmp_path / "telling.py").write_text(
        "import os\nprint('', *os.environ, file=open('told', 'w'))"
    )
    monkeypatch.chdir(tmp_path)
    for name in NOT_FOR_CHILDREN:
        monkeypatch.setenv(name, "1")
    place = {"PYTHONPATH": str(tmp_path)}
    spec = ChildSpec(ProcessName("worker/0"), "worker", "telling", b"{}", place)
    child = ChildProcess(spec, 0, ChildOutput(lambda data: None))
    eventually(lambda: child.reap() is not None, what="it has ended")
    child.close()
    names = set(told.read_text().split())
    assert "PATH" in names
    assert not names & NOT_FOR_CHILDREN


def test_what_a_child_did_before_its_death_does_not_count_for_its_successor(bench):
    assert bench.live(loading=1.0, serving=HEALTHY_SECONDS) == 0.0
    assert bench.live(loading=1.0, serving=0.0) == pytest.approx(FIRST_DELAY_SECONDS)


@pytest.fixture
def kills(monkeypatch) -> list[int]:
    """How many processes the kernel says it has killed for memory: the last entry."""
    counts = [3]
    source = Path("/sys/fs/cgroup/service/memory.events")
    monkeypatch.setattr(memory_watch, "oom_kills", lambda: OomKills(counts[-1], source))
    return counts


def test_a_child_killed_for_memory_says_so_and_what_to_do(kills, bench, caplog):
    bench.live(loading=1.0, serving=HEALTHY_SECONDS)
    assert bench.child.last_exit == "signal SIGKILL"
    kills.append(5)  # a neighbour as well
    bench.live(loading=1.0, serving=HEALTHY_SECONDS)
    assert bench.child.last_exit == "signal SIGKILL, probably for lack of memory"
    assert (
        "worker/0 has ended (signal SIGKILL, probably for lack of memory; /sys/fs/cgroup/service/"
        "memory.events says oom_kill 5: raise the memory limit, or lower --hicache-size-gb"
    ) in caplog.text
    bench.live(loading=1.0, serving=HEALTHY_SECONDS)
    assert bench.child.last_exit == "signal SIGKILL"


def test_all_that_are_killed_for_memory_at_once_say_so(kills, monkeypatch):
    monkeypatch.setattr(daemon.supervision.supervisor, "ChildProcess", FakeProcess)
    names = [ProcessName("worker/0"), ProcessName("worker/1")]
    specs = [ChildSpec(name, "worker", "none", b"{}") for name in names]
    supervisor = Supervisor(specs, lambda pids: None, ChildOutput(lambda data: None))
    supervisor.start_all()
    for child in supervisor.children.values():
        child.process.code = -signal.SIGKILL
    kills.append(5)
    deaths = supervisor.collect_deaths(1000.0, give_up_on_loops=True)
    assert ["for lack of memory" in death.reason for death in deaths] == [True, True]
