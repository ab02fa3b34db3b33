"""The worker looks its books over when nobody waits for it, and does so once a pause."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import zmq

from transport.child import StopFlag
from transport.ids import ProcessName
from transport.messages.base import Hello
from transport.telemetry.metrics import MetricSet
from workers.daemon_inbox import DaemonInbox
from workers.engine.fake import FakeEngine, FakeEngineSettings
from workers.scheduling.scheduler import Scheduler
from workers.telemetry import WorkerTelemetry
from workers.worker import Worker

HELLO = Hello(1, "worker", ProcessName("worker/0"), 1, "hash")


class CountingScheduler(Scheduler):
    """Counts the checks."""

    checks = 0

    def check_integrity(self) -> None:
        self.checks += 1
        super().check_integrity()


@pytest.fixture
def sockets():
    context = zmq.Context()
    far, near = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    far.bind("inproc://router")
    near.connect("inproc://router")
    yield far, near
    far.close(linger=0)
    near.close(linger=0)
    context.term()


def run_turns(near, turns, on_turn=lambda turn: None) -> CountingScheduler:
    """Let a worker without requests make some turns; returns its scheduler."""
    engine = FakeEngine(FakeEngineSettings(100, 16, 4, 256))
    scheduler = CountingScheduler(engine.info, 512, 1)
    stop = StopFlag()
    made = []

    def tick() -> None:
        made.append(None)
        on_turn(len(made))
        if len(made) == turns:
            stop.set()

    def receive(_handle, _limit) -> None:
        while near.poll(0):
            near.recv()

    worker = Worker(
        0, engine, scheduler,
        SimpleNamespace(socket=near, can_send=True, send=lambda *parts: True, receive=receive),
        HELLO,
        DaemonInbox(),
        SimpleNamespace(tick=tick, set_state=lambda *parts: None),
        WorkerTelemetry(MetricSet(), engine.info),
    )  # fmt: skip
    worker.run(stop, 0.01)
    return scheduler


def test_a_pause_is_used_for_one_check(sockets):
    assert run_turns(sockets[1], 6).checks == 1


def test_no_check_comes_between_messages_that_follow_each_other(sockets):
    far, near = sockets
    assert run_turns(near, 6, on_turn=lambda turn: far.send(b"")).checks == 0
