"""Every process's line to the daemon: hello, heartbeats, state, commands.

A thread of its own owns both sockets, so that the daemon can look into a process whose main loop
hangs: the thread goes on answering while `progress` stands still, and that is how a hang is told
from a quiet spell.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
import zmq

from transport.child import EXIT_AGAIN, EXIT_FATAL, ProcessSettings
from transport.framing import BadMessage
from transport.ids import ROUTER_NAME
from transport.logs import set_level
from transport.messages.base import PROTOCOL_VERSION, Hello, Message, Refused, Welcome
from transport.messages.control import (
    CommandDone,
    DumpStacks,
    FatalError,
    PeerLost,
    SetLogLevel,
    StateChanged,
)
from transport.messages.telemetry import ProcessState, RequestRow, Snapshot
from transport.sockets import (
    LINGER_MS,
    CountingSocket,
    DealerSocket,
    Endpoints,
    PublisherSocket,
    Received,
)
from transport.stacks import thread_stacks
from transport.telemetry.metrics import MetricSet
from transport.telemetry.values import SocketStats

TELEMETRY_QUEUE = 100
MAX_OUTBOX = 1000

log = logging.getLogger(__name__)


class LinkError(RuntimeError):
    """The daemon or the router did not answer in time."""


class LinkRefusedError(LinkError):
    """The daemon refused this process."""


class RouterRefusedError(LinkRefusedError):
    """The router refused this process."""


def exit_code_of(error: LinkError) -> int:
    """Log why a process ends that cannot join its instance; returns its exit code.

    Only a refusal is final. Who did not answer may have been stopped or starved, and answers the next
    process.
    """
    log.error("%s", error)
    return EXIT_FATAL if isinstance(error, LinkRefusedError) else EXIT_AGAIN


class TelemetrySource(Protocol):
    """What a process adds to its snapshots beyond its metrics. Called from the link's thread."""

    def socket_stats(self) -> list[SocketStats]:
        """Traffic of the process's other sockets: the link adds its own two."""
        ...

    def request_rows(self) -> list[RequestRow]:
        """Live requests (the router's answer; others return nothing)."""
        ...


class SocketTelemetry:
    """The source of a process that has sockets and no request table."""

    def __init__(self, *sockets: CountingSocket) -> None:
        self._sockets = sockets

    def socket_stats(self) -> list[SocketStats]:
        return [socket.stats() for socket in self._sockets]

    def request_rows(self) -> list[RequestRow]:
        return []


class RouterLossNotice:
    """Remembers that the daemon has said that the router is gone, for a main loop to act on."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def notice(self, received: Received) -> None:
        """Take a message of the daemon; others than the router's loss do not matter here."""
        match received.message:
            case PeerLost(name) if name == ROUTER_NAME:
                self.event.set()
            case other:
                log.debug("the daemon sent a %s", type(other).__name__)


class DaemonLink:
    """Owner of the control and telemetry sockets of one process."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        settings: ProcessSettings,
        metrics: MetricSet,
        source: TelemetrySource,
        on_message: Callable[[Received], None],
    ) -> None:
        """`on_message` gets what the daemon sends, with its frames, on the link's thread."""
        self._context = context
        self._settings = settings
        self._metrics = metrics
        self._source = source
        self._on_message = on_message
        self._state: ProcessState = "starting"
        self._detail = ""
        self._progress = 0
        self._outbox: list[tuple[Message, tuple[bytes, ...]]] = []
        self._lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._next_snapshot = 0.0
        self._welcomed = threading.Event()
        self._refusal: str | None = None
        self._thread = threading.Thread(target=self._run, name="daemon-link", daemon=True)

    def start(self) -> None:
        """Connect and say hello.

        Raises:
            LinkRefusedError: another version or configuration, or not expected.
            LinkError: no answer in time.
        """
        self._thread.start()
        if not self._welcomed.wait(self._settings.connect_seconds):
            raise LinkError(f"the daemon did not answer within {self._settings.connect_seconds} s")
        if self._refusal is not None:
            raise LinkRefusedError(f"the daemon refused this process: {self._refusal}")

    def set_state(self, state: ProcessState, detail: str = "") -> None:
        """Tell the daemon what this process is doing. From any thread."""
        self._state, self._detail = state, detail
        self._post(StateChanged(state, detail))

    def fatal(self, reason: str) -> None:
        """Tell the daemon that this process ends for a reason that a restart would not cure."""
        self._post(FatalError(reason))

    def post(self, message: Message, *frames: bytes) -> None:
        """Send the daemon a message with its frames. From any thread."""
        self._post(message, *frames)

    def tick(self) -> None:
        self._progress += 1

    def close(self) -> None:
        """Send what is queued, close both sockets, end the thread. Idempotent."""
        self._closing = True
        self._wake()
        self._thread.join(timeout=2 * LINGER_MS / 1000)

    def _post(self, message: Message, *frames: bytes) -> None:
        with self._lock:
            if len(self._outbox) < MAX_OUTBOX:
                self._outbox.append((message, frames))
        self._wake()

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        endpoints = Endpoints(self._settings.run_dir)
        control = DealerSocket(self._context, endpoints.control, self._settings.name)
        telemetry = PublisherSocket(self._context, endpoints.telemetry, TELEMETRY_QUEUE)
        poller = zmq.Poller()
        poller.register(control.socket, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        try:
            control.send(self._hello())
            while not self._closing:
                wait = max(self._next_snapshot - time.monotonic(), 0.0)
                poller.poll(round(wait * 1000))
                self._turn(control, telemetry)
            self._flush(control)
        finally:
            control.close()
            telemetry.close()

    def _hello(self) -> Hello:
        settings = self._settings
        return Hello(
            PROTOCOL_VERSION, settings.role, settings.name, os.getpid(), settings.config_hash
        )

    def _turn(self, control: DealerSocket, telemetry: PublisherSocket) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        try:
            for received in control.drain():
                self._receive(control, received)
        except BadMessage:
            log.exception("dropped a message of the daemon that cannot be decoded")
        self._flush(control)
        now = time.monotonic()
        if now < self._next_snapshot:
            return
        self._next_snapshot = now + self._settings.heartbeat_seconds
        if not telemetry.publish(self._snapshot([control.stats(), telemetry.stats()])):
            log.debug("a snapshot was dropped: the daemon does not read")

    def _receive(self, control: DealerSocket, received: Received) -> None:
        match received.message:
            case Welcome():
                self._welcomed.set()
            case Refused(reason):
                self._refusal = reason
                self._welcomed.set()
            case DumpStacks(serial):
                control.send(CommandDone(serial), msgspec.json.encode(thread_stacks()))
            case SetLogLevel(level, serial):
                set_level(level)
                log.info("the log level is %s from now on", level)
                control.send(CommandDone(serial), b"")
            case _:
                self._on_message(received)

    def _flush(self, control: DealerSocket) -> None:
        with self._lock:
            outbox, self._outbox = self._outbox, []
        for message, frames in outbox:
            if not control.send(message, *frames):
                log.warning("the daemon does not read: lost a %s", type(message).__name__)

    def _snapshot(self, own_sockets: list[SocketStats]) -> Snapshot:
        return Snapshot(
            name=self._settings.name,
            pid=os.getpid(),
            state=self._state,
            detail=self._detail,
            progress=self._progress,
            counters=self._metrics.read_counters(),
            gauges=self._metrics.read_gauges(),
            histograms=self._metrics.read_histograms(),
            sockets=[*self._source.socket_stats(), *own_sockets],
            queues=self._metrics.read_queues(),
            requests=self._source.request_rows(),
        )
