"""A router that does not read for a while gets every token in the end, and nothing is computed meanwhile."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import zmq

from transport.child import StopFlag
from transport.framing import read_tokens, token_frame
from transport.ids import ROUTER_NAME, ProcessName, RequestId
from transport.messages.base import Hello, Message, Welcome
from transport.messages.from_daemon import PeerLost
from transport.messages.generate import RUNNING, Generate, SamplingParams, TokenBatch
from transport.messages.to_router import WorkerReady
from transport.messages.to_worker import Start
from transport.sockets import Received
from transport.telemetry.metrics import MetricSet
from workers.daemon_inbox import DaemonInbox
from workers.engine.fake import FakeEngine, FakeEngineSettings
from workers.scheduling.scheduler import Scheduler
from workers.telemetry import WorkerTelemetry
from workers.worker import Worker

HELLO = Hello(1, "worker", ProcessName("worker/0"), 1, "hash")
NUM_TOKENS = 20


class Dealer:
    """The socket to a router that takes what it is told to take."""

    def __init__(self, socket: zmq.Socket) -> None:
        self.socket = socket
        self.incoming: list[Message] = []
        self.sent: list[tuple[Message, tuple]] = []
        self.reads = True

    @property
    def can_send(self) -> bool:
        return self.reads

    def send(self, message: Message, *frames) -> bool:
        assert self.reads
        self.sent.append((message, frames))
        return True

    def receive(self, handle, _limit) -> None:
        while self.incoming:
            frames = [zmq.Frame(bytes(token_frame([5, 6, 7])))]
            handle(Received(self.incoming.pop(0), zmq.Frame(b""), frames, ProcessName("")))

    def tokens(self) -> list[int]:
        batches = [(m, frames) for m, frames in self.sent if isinstance(m, TokenBatch)]
        return [token for _, frames in batches for token in read_tokens(frames[0]).tolist()]


@pytest.fixture
def dealer():
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.bind("inproc://router")
    yield Dealer(socket)
    socket.close(linger=0)
    context.term()


def run(dealer: Dealer, on_turn, inbox: DaemonInbox) -> Scheduler:
    """Let a worker make turns until `on_turn(number of the turn)` says so; returns its scheduler."""
    engine = FakeEngine(FakeEngineSettings(100, 16, 4, 256))
    scheduler = Scheduler(engine.info, 512, 1)
    stop = StopFlag()
    turns = []

    def tick() -> None:
        turns.append(None)
        assert len(turns) < 1000
        if on_turn(len(turns), scheduler):
            stop.set()

    link = SimpleNamespace(tick=tick, set_state=lambda *parts: None)
    telemetry = WorkerTelemetry(MetricSet(), engine.info)
    Worker(0, engine, scheduler, dealer, HELLO, inbox, link, telemetry).run(stop, 0.01)
    return scheduler


def start() -> Start:
    generate = Generate(SamplingParams(NUM_TOKENS, temperature=0.0, ignore_eos=True))
    return Start(RequestId("a"), 0, ProcessName("frontend/0"), 3, generate, 0.0)


def ended(dealer: Dealer) -> bool:
    return any(isinstance(m, TokenBatch) and m.finish != [RUNNING] for m, _ in dealer.sent)


def test_a_router_that_does_not_read_for_a_while_gets_every_token(dealer):
    dealer.incoming = [start()]
    run(dealer, lambda turn, scheduler: ended(dealer), DaemonInbox())
    undisturbed = dealer.tokens()
    assert len(undisturbed) == NUM_TOKENS
    dealer.sent.clear()
    dealer.incoming = [start()]
    steps = []

    def on_turn(turn: int, scheduler: Scheduler) -> bool:
        steps.append(scheduler.counts.decode_steps)
        dealer.reads = not 5 <= turn < 25
        return ended(dealer)

    run(dealer, on_turn, DaemonInbox())
    assert dealer.tokens() == undisturbed
    assert steps[23] - steps[4] <= 1, "one step more than the router has heard of"


def test_what_a_lost_router_did_not_take_is_not_for_its_successor(dealer):
    dealer.incoming = [start()]
    inbox = DaemonInbox()

    def on_turn(turn: int, scheduler: Scheduler) -> bool:
        if turn == 5:
            dealer.reads = False
        elif turn == 10:
            dealer.sent.clear()
            inbox.take(PeerLost(ROUTER_NAME), [])
        elif turn == 15:
            dealer.reads = True
            dealer.incoming = [Welcome()]
        return any(isinstance(m, WorkerReady) for m, _ in dealer.sent)

    scheduler = run(dealer, on_turn, inbox)
    assert [type(message) for message, _ in dealer.sent] == [Hello, WorkerReady]
    assert scheduler.num_running == 0
