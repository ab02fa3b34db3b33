"""The router's process: `python -m daemon.router.run`, started by the daemon."""

from __future__ import annotations

import gc
import logging
import queue
import sys
import time
from contextlib import closing
from typing import assert_never

import zmq

from daemon.router.core import RouterCore
from daemon.router.metrics import RouterMetrics
from daemon.router.outbox import Outbox, Outgoing
from daemon.router.settings import RouterSettings
from daemon.router.tap import Tap
from transport.child import StopFlag
from transport.ids import ProcessName
from transport.links.daemon import DaemonLink
from transport.logs import Seldom
from transport.messages.base import Hello, Refused, Welcome
from transport.messages.from_daemon import ROUTER_NOTICES, Drain, PeerLost, RouterNotice
from transport.messages.generate import Cancel, Encode, Encoded, RequestFailed, Throttle, TokenBatch
from transport.messages.to_router import (
    TO_ROUTER,
    RouterWork,
    SequenceFailed,
    Submit,
    ToRouter,
    WorkerReady,
)
from transport.process import Process, run_process
from transport.sockets import Received, RouterSocket

TICK_SECONDS = 0.25
MAX_NOTICES = 1000

log = logging.getLogger(__name__)


class Router:
    """Moves messages between the socket and the core, and shows them to the tap. Owns none."""

    def __init__(
        self,
        settings: RouterSettings,
        socket: RouterSocket[ToRouter],
        core: RouterCore,
        link: DaemonLink[RouterNotice],
        tap: Tap,
    ) -> None:
        self._settings = settings
        self._socket = socket
        self._outbox = Outbox(socket)
        self._tap = tap
        self._core = core
        self._link = link
        self._pids: dict[ProcessName, int] = {}
        self._strangers, self._incomplete, self._refused = Seldom(), Seldom(), Seldom()

    def run(self, stop: StopFlag, notices: queue.Queue[RouterNotice]) -> None:
        """Route until `stop` is set. `notices` holds what the daemon said."""
        poller = zmq.Poller()
        poller.register(self._socket.socket, zmq.POLLIN)
        poller.register(self._tap.socket, zmq.POLLIN)
        poller.register(stop.fd, zmq.POLLIN)
        next_tick = 0.0
        while not stop.is_set():
            events = dict(poller.poll(round(TICK_SECONDS * 1000)))
            self._take_notices(notices)
            if self._tap.socket in events:
                self._tap.listen()
            self._socket.receive(self._receive)
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + TICK_SECONDS
                for sent in self._outbox.retry():
                    self._show(sent)
                self._send_all(self._core.tick(now))
                self._core.check_integrity()
            self._link.tick()

    def _receive(self, received: Received[ToRouter]) -> None:
        if self._tap.is_open:
            self._tap.saw_incoming(received)
        self._send_all(self._handle(received, time.monotonic()))

    def _take_notices(self, notices: queue.Queue[RouterNotice]) -> None:
        while not notices.empty():
            match notices.get_nowait():
                case PeerLost(name, comes_back, pid):
                    self._lost(name, comes_back, pid)
                case Drain():
                    self._core.drain()
                case other:
                    assert_never(other)

    def _lost(self, name: ProcessName, comes_back: bool, pid: int) -> None:
        if pid and self._pids.get(name, pid) != pid:
            return  # its successor has said hello before
        log.warning("%s is gone; its requests move on", name)
        self._pids.pop(name, None)
        self._outbox.forget(name)
        self._send_all(self._core.peer_lost(name, time.monotonic(), comes_back))

    def _handle(self, received: Received[ToRouter], now: float) -> list[Outgoing]:
        peer, frames = received.peer, received.frames
        match received.message:
            case Hello() as hello:
                return self._greet(peer, hello, now)
            case _ if peer not in self._pids:
                text = "dropped a message of %s, which has not said hello"
                self._strangers.log(log, logging.WARNING, text, peer)
                return []
            case Submit() | Encode() | Encoded() | TokenBatch() if not frames:
                text = "dropped a message of %s that lacks its payload"
                self._incomplete.log(log, logging.ERROR, text, peer)
                return []
            case message:
                return self._dispatch(peer, message, received, now)

    def _dispatch(
        self, peer: ProcessName, message: RouterWork, received: Received[ToRouter], now: float
    ) -> list[Outgoing]:
        frames = received.frames
        match message:
            case TokenBatch() as batch:
                return self._core.tokens(peer, batch, received, now)
            case Submit() | Encode() as prompt:
                return self._core.submit(peer, prompt, frames[0], now)
            case Encoded() as encoded:
                return self._core.encoded(peer, encoded, frames[0], now)
            case Cancel() as cancel:
                return self._core.cancel(cancel, now)
            case Throttle() as throttle:
                return self._core.throttle(throttle)
            case RequestFailed() as failed:
                return self._core.encoding_failed(peer, failed, now)
            case SequenceFailed() as failed:
                return self._core.sequence_failed(peer, failed)
            case WorkerReady() as ready:
                log.info("rank %d is ready", ready.rank)
                return self._core.worker_ready(peer, ready)
            case other:
                assert_never(other)

    def _greet(self, peer: ProcessName, hello: Hello, now: float) -> list[Outgoing]:
        problem = hello.problem("router", self._settings.process.config_hash)
        if problem is not None:
            self._refused.log(log, logging.ERROR, "refused %s: %s", peer, problem)
            return [Outgoing(peer, Refused(problem))]
        out: list[Outgoing] = []
        if self._pids.get(peer, hello.pid) != hello.pid:
            # Its predecessor, if the daemon has not said so.
            self._outbox.forget(peer)
            out += self._core.peer_lost(peer, now)
        self._pids[peer] = hello.pid
        out.append(Outgoing(peer, Welcome()))
        return out + self._core.peer_joined(peer, hello.role, now)

    def _send_all(self, outgoing: list[Outgoing]) -> None:
        for item in outgoing:
            match self._outbox.send(item):
                case "sent":
                    self._show(item)
                case "lost":
                    self._give_up(item)
                case "kept":
                    pass

    def _give_up(self, item: Outgoing) -> None:
        log.warning("%s hangs or has gone: the requests of a step's tokens are given up", item.peer)
        if isinstance(item.header, TokenBatch):
            self._send_all(self._core.tokens_lost(item.header))

    def _show(self, item: Outgoing) -> None:
        if not self._tap.is_open:
            return
        frames = item.frames if item.forward is None else item.forward.frames
        self._tap.saw_outgoing(item.peer, item.header, frames)


def main() -> int:
    return run_process(RouterSettings, ROUTER_NOTICES, _serve)


def _serve(process: Process[RouterSettings, RouterNotice]) -> None:
    settings, daemon = process.settings, process.daemon
    core = RouterCore(settings, RouterMetrics(process.metrics, settings))
    notices: queue.Queue[RouterNotice] = queue.Queue(MAX_NOTICES)
    with (
        closing(
            RouterSocket(
                process.context, process.endpoints.router, TO_ROUTER, settings.process.max_frame
            )
        ) as socket,
        closing(Tap(process.context, process.endpoints.tap)) as tap,
    ):
        daemon.watch(socket, tap, request_rows=core.rows)
        daemon.start(lambda notice, frames: notices.put_nowait(notice))
        gc.freeze()
        daemon.set_state("ready")
        Router(settings, socket, core, daemon, tap).run(process.stop, notices)


if __name__ == "__main__":
    sys.exit(main())
