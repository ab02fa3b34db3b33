"""The router's loop with real sockets, whose queues are short: peers that do not read for a while."""

from __future__ import annotations

import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import zmq

from daemon.router.core import RouterCore
from daemon.router.metrics import RouterMetrics
from daemon.router.run import Router
from daemon.router.settings import RouterSettings
from daemon.router.tap import Tap
from transport import sockets
from transport.child import ProcessSettings, StopFlag
from transport.framing import token_frame
from transport.ids import ROUTER_NAME, ProcessName, RequestId
from transport.messages.any import ANY_MESSAGE
from transport.messages.base import PROTOCOL_VERSION, Hello, Message, Refused, Welcome
from transport.messages.from_daemon import PeerLost, RouterNotice
from transport.messages.generate import (
    RUNNING,
    Cancel,
    Generate,
    ModelInfo,
    RequestFailed,
    SamplingParams,
    TokenBatch,
)
from transport.messages.to_router import TO_ROUTER, Submit, WorkerReady
from transport.messages.to_worker import Start
from transport.sockets import DealerSocket, Endpoints, RouterSocket
from transport.telemetry.metrics import MetricSet

SECONDS = 20.0
FRONTEND = ProcessName("frontend/0")
WORKER = ProcessName("worker/0")
MODEL = ModelInfo(vocab_size=100, max_model_len=1 << 20, eos_token_ids=(2,), pool_tokens=1 << 20)
PROMPT = token_frame(np.ones(20_000, dtype=np.int32))
"""Long: the kernel's buffers hold few of them."""
REQUESTS = 100


class Link:
    """Stands in for the line to the daemon."""

    def tick(self) -> None:
        pass


class Peer:
    """One process at the router; reads only when told to."""

    def __init__(self, context: zmq.Context, endpoint: str, name: ProcessName, role: str) -> None:
        self.context, self.endpoint = context, endpoint
        self.dealer = DealerSocket(context, endpoint, name, ANY_MESSAGE)
        self.name, self.role = name, role

    def greet(self, pid: int = 1) -> None:
        self.dealer.send(Hello(PROTOCOL_VERSION, self.role, self.name, pid, "hash"))
        self.take(lambda m: isinstance(m, Welcome))

    def take(self, wanted: Callable[[Message], bool], count: int = 1) -> list[Message]:
        """Read until `count` such messages have come."""
        found: list[Message] = []
        deadline = time.monotonic() + SECONDS
        while len(found) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} messages came"
            self.dealer.socket.poll(100)
            found += [r.message for r in self.dealer.drain(1) if wanted(r.message)]
        return found

    def send(self, message: Message, *frames: memoryview) -> None:
        deadline = time.monotonic() + SECONDS
        while not self.dealer.send(message, *frames):
            assert time.monotonic() < deadline, "the router does not read"
            self.dealer.socket.poll(10, zmq.POLLOUT)


@pytest.fixture
def notices() -> queue.Queue[RouterNotice]:
    """What the daemon says."""
    return queue.Queue()


@pytest.fixture
def join(monkeypatch, notices) -> Iterator[Callable[[ProcessName, str], Peer]]:
    """join(name, role): a process that the running router has welcomed."""
    monkeypatch.setattr(sockets, "HIGH_WATER_MARK", 5)
    folder = tempfile.mkdtemp(prefix="di-", dir="/tmp")
    endpoints = Endpoints(folder)
    context = zmq.Context()
    settings = RouterSettings(
        process=ProcessSettings(ROUTER_NAME, "router", "test", folder, 1, "hash"),
        workers=1, tokenizers=1, max_waiting=1000, max_waiting_choices=1000,
        max_waiting_bytes=1_000_000_000, routing="least-loaded", retry_after_seconds=1,
        max_migrations=3, stage_seconds=60.0, start_seconds=600.0,
    )  # fmt: skip
    core = RouterCore(settings, RouterMetrics(MetricSet(), settings))
    socket, tap = RouterSocket(context, endpoints.router, TO_ROUTER), Tap(context, endpoints.tap)
    stop = StopFlag()
    router = Router(settings, socket, core, Link(), tap)
    thread = threading.Thread(target=router.run, args=(stop, notices))
    thread.start()

    def make(name: ProcessName, role: str) -> Peer:
        peer = Peer(context, endpoints.router, name, role)
        peer.greet()
        if role == "worker":
            peer.dealer.send(WorkerReady(0, MODEL, 8))
        return peer

    yield make
    stop.set()
    thread.join(SECONDS)
    context.destroy(linger=0)
    shutil.rmtree(folder)
    assert not thread.is_alive()


def submit(frontend: Peer, name: str, max_tokens: int = 8) -> None:
    generate = Generate(SamplingParams(max_tokens=max_tokens))
    frontend.send(Submit(RequestId(name), "tokens", generate, 0.0), PROMPT)


def test_a_worker_that_did_not_read_for_a_while_gets_every_start(join):
    worker = join(WORKER, "worker")
    frontend = join(FRONTEND, "frontend")
    names = [f"r{i}" for i in range(REQUESTS)]
    for name in names:
        submit(frontend, name)
    # An answer to the last one shows that all have been routed.
    frontend.send(
        Submit(RequestId("r0"), "tokens", Generate(SamplingParams(max_tokens=1)), 0.0), PROMPT
    )
    (refused,) = frontend.take(lambda m: isinstance(m, RequestFailed))
    assert refused.code == "duplicate_request_id"
    started = worker.take(lambda m: isinstance(m, Start), REQUESTS)
    assert sorted(start.request_id for start in started) == sorted(names)


def test_a_frontend_that_does_not_read_gets_an_error_instead_of_a_text_with_a_hole(join):
    worker = join(WORKER, "worker")
    frontend = join(FRONTEND, "frontend")
    submit(frontend, "a", max_tokens=1 << 19)
    worker.take(lambda m: isinstance(m, Start))
    tokens = token_frame(np.ones(20_000, dtype=np.int32))
    cancels: list[Message] = []
    for step in range(REQUESTS):
        batch = TokenBatch(FRONTEND, step, [RequestId("a")], [0], [20_000], [RUNNING])
        worker.send(batch, tokens)
        cancels += [r.message for r in worker.dealer.drain() if isinstance(r.message, Cancel)]
    cancels = cancels or worker.take(lambda m: isinstance(m, Cancel))
    assert [(c.request_id, c.cause) for c in cancels] == [("a", "failed")]
    (failed,) = frontend.take(lambda m: isinstance(m, RequestFailed))
    assert (failed.request_id, failed.code) == ("a", "tokens_lost")


@pytest.mark.parametrize(
    ("version", "configuration", "reason"),
    [
        (PROTOCOL_VERSION + 1, "hash", f"speaks protocol {PROTOCOL_VERSION + 1}"),
        (PROTOCOL_VERSION, "other", "started with another configuration"),
    ],
)
def test_a_process_of_another_release_is_refused_and_not_heard(
    join, version, configuration, reason
):
    frontend = join(FRONTEND, "frontend")
    stranger = Peer(frontend.context, frontend.endpoint, WORKER, "worker")
    stranger.send(Hello(version, "worker", WORKER, 1, configuration))
    (refused,) = stranger.take(lambda m: isinstance(m, Refused))
    assert reason in refused.reason
    stranger.send(WorkerReady(0, MODEL, 8))
    stranger.send(Hello(version, "worker", WORKER, 1, configuration))
    stranger.take(lambda m: isinstance(m, Refused))
    submit(frontend, "a")
    (answer,) = frontend.take(lambda m: isinstance(m, RequestFailed))
    assert answer.code == "not_ready", "its word counts for nothing"


def test_the_late_news_of_a_loss_does_not_hit_the_successor(join, notices):
    join(WORKER, "worker")
    frontend = join(FRONTEND, "frontend")
    frontend.greet(pid=2)
    for name, pid in ((FRONTEND, 1), (ProcessName("frontend/9"), 0)):
        notices.put(PeerLost(name, True, pid))
    submit(frontend, "a")
    submit(frontend, "a")
    (answer,) = frontend.take(lambda m: isinstance(m, RequestFailed))
    assert answer.code == "duplicate_request_id"
