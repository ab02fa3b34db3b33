"""What a process says of itself is noted, and only of itself. The clock and the processes are fabricated."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

import daemon.instance.process_reports
from daemon.instance.frontend_status import FrontendStatus
from daemon.instance.process_reports import ProcessReports
from daemon.supervision.child_output import ChildOutput
from daemon.supervision.child_process import ChildSpec
from daemon.supervision.supervisor import Supervisor
from transport.ids import ProcessName
from transport.messages.base import Hello
from transport.messages.from_daemon import InstanceStatus
from transport.messages.telemetry import Snapshot
from transport.messages.to_daemon import StateChanged

WORKER = ProcessName("worker/0")


class Bench:
    """One worker, process 4711, that was started at 100."""

    def __init__(self, monkeypatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(
            daemon.instance.process_reports, "time", SimpleNamespace(monotonic=lambda: self.now)
        )
        specs = [ChildSpec(WORKER, "worker", "none", b"{}")]
        self.supervisor = Supervisor(specs, lambda pids: None, ChildOutput(lambda data: None))
        self.child = self.supervisor.children[WORKER]
        self.child.process = SimpleNamespace(pid=4711)
        self.child.started_at = self.child.snapshot_at = self.child.progress_at = 100.0

        def send(*_: object) -> bool:
            return True

        frontends = FrontendStatus(send, InstanceStatus("starting"), 0.0)
        self.reports = ProcessReports(self.supervisor, frontends, send, lambda snapshot: None)

    def tell(self, at: float, progress: int, pid: int = 4711) -> None:
        self.now = at
        nothing: dict[str, list] = {}
        self.reports.snapshot(
            Snapshot(
                name=WORKER, pid=pid, state="ready", detail="", progress=progress, counters=nothing,
                gauges=nothing, histograms=nothing, sockets=[], queues=[], requests=[],
            )
        )  # fmt: skip

    def seen(self) -> tuple[float, float]:
        return self.child.snapshot_at, self.child.progress_at


@pytest.fixture
def bench(monkeypatch) -> Bench:
    return Bench(monkeypatch)


def test_each_snapshot_is_a_sign_of_life_and_a_grown_count_one_of_work(bench):
    bench.tell(101.0, progress=5)
    assert bench.seen() == (101.0, 101.0)
    bench.tell(102.0, progress=5)
    assert bench.seen() == (102.0, 101.0), "its main loop stands still"
    bench.tell(103.0, progress=6)
    assert bench.seen() == (103.0, 103.0)


def test_the_last_words_of_a_dead_process_do_not_count_for_its_successor(bench):
    bench.tell(101.0, progress=5, pid=4710)
    assert bench.seen() == (100.0, 100.0)
    assert bench.child.snapshot is None


def test_it_has_served_since_it_was_first_ready(bench):
    for at, state in ((105.0, "loading"), (110.0, "ready"), (120.0, "loading"), (130.0, "ready")):
        bench.now = at
        bench.reports.state_changed(WORKER, StateChanged(state))
    assert bench.child.served_from == 110.0


def test_only_the_process_that_was_started_under_a_name_is_known_by_it(bench):
    known = Hello(1, "worker", WORKER, 4711, "hash")
    assert bench.reports.knows(known) is None
    for other in ({"pid": 4710}, {"name": ProcessName("worker/1")}):
        assert "is not" in bench.reports.knows(msgspec.structs.replace(known, **other))
