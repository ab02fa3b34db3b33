"""A router's rules and the workers of two ranks over real engines, without processes and sockets."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import zmq

from daemon.router.outbox import Outgoing
from tests.support.router import FRONTEND, make_core, worker
from transport.framing import encode_header, read_tokens, token_frame
from transport.ids import ProcessName, RequestId
from transport.messages.base import Hello, Message
from transport.messages.generate import RUNNING, Generate, SamplingParams, TokenBatch
from transport.messages.to_router import Submit
from transport.messages.to_worker import Start
from transport.sockets import Received
from transport.telemetry.metrics import MetricSet
from workers.contract import Engine
from workers.daemon_inbox import DaemonInbox
from workers.scheduling.scheduler import Scheduler
from workers.telemetry import WorkerTelemetry
from workers.worker import Worker

MOST_TURNS = 5000


class TwoRanks:
    """Requests are named by their numbers, from 0."""

    def __init__(self, engines: list[Engine], chunk: int) -> None:
        self._core = make_core(workers=len(engines), max_waiting=100)
        self._core.peer_joined(FRONTEND, "frontend", 0.0)
        self._sent: list[tuple[ProcessName, Message, tuple]] = []
        self._workers: dict[ProcessName, Worker] = {}
        self.tokens: defaultdict[str, list[int]] = defaultdict(list)
        self.generated: dict[ProcessName, int] = {}
        """Tokens by rank."""
        self.moved: set[str] = set()
        """Requests that were started with tokens of their answer."""
        self._open: set[str] = set()
        link = SimpleNamespace(tick=lambda: None, set_state=lambda *parts: None)
        for rank, engine in enumerate(engines):
            name = worker(rank)
            self._workers[name] = made = Worker(
                rank, engine, Scheduler(engine.info, chunk, 1), self._dealer(name),
                Hello(1, "worker", name, 1, "hash"), DaemonInbox(), link,
                WorkerTelemetry(MetricSet(), engine.info),
            )  # fmt: skip
            self.generated[name] = 0
            made.on_welcome()
            for peer, message, _ in self._take_sent():
                self._deliver(self._core.worker_ready(peer, message))

    def _dealer(self, name: ProcessName) -> SimpleNamespace:
        def send(message: Message, *frames) -> bool:
            self._sent.append((name, message, frames))
            return True

        return SimpleNamespace(can_send=True, send=send)

    def submit(self, prompt: list[int], sampling: SamplingParams) -> None:
        name = str(len(self._open))
        self._open.add(name)
        message = Submit(RequestId(name), "tokens", Generate(sampling), float(name))
        self._deliver(self._core.submit(FRONTEND, message, token_frame(prompt), 1.0))

    def lose(self, rank: int) -> None:
        del self._workers[worker(rank)]
        self._deliver(self._core.peer_lost(worker(rank), 2.0, comes_back=False))

    def turn(self) -> None:
        """A step of every rank that is left."""
        for made in self._workers.values():
            made._step()
        for peer, batch, frames in self._take_sent():
            assert isinstance(batch, TokenBatch), batch
            self.generated[peer] += len(batch.request_ids)
            header = zmq.Frame(encode_header(batch))
            received = Received(batch, header, [zmq.Frame(bytes(f)) for f in frames], peer)
            self._deliver(self._core.tokens(peer, batch, received, 3.0))

    def run(self) -> None:
        for _ in range(MOST_TURNS):
            if not self._open:
                return
            self.turn()
        raise AssertionError(f"{self._open} do not end")

    def _take_sent(self) -> list[tuple[ProcessName, Message, tuple]]:
        sent, self._sent = self._sent, []
        return sent

    def _deliver(self, outgoing: list[Outgoing]) -> None:
        for item in outgoing:
            if item.forward is not None:
                self._read(item.forward)
            elif isinstance(item.message, Start):
                frames = [zmq.Frame(bytes(frame)) for frame in item.frames]
                if len(read_tokens(frames[0])) > item.message.prompt_len:
                    self.moved.add(item.message.request_id)
                self._workers[item.peer].on_message(item.message, frames)

    def _read(self, received: Received[Message]) -> None:
        """As a frontend does."""
        batch = received.message
        assert isinstance(batch, TokenBatch)
        ids = iter(read_tokens(received.frames[0]).tolist())
        for name, count, finish in zip(batch.request_ids, batch.counts, batch.finish, strict=True):
            self.tokens[name] += [next(ids) for _ in range(count)]
            if finish != RUNNING:
                self._open.remove(name)
