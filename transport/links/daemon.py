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
from functools import partial
from typing import Generic

import msgspec
import zmq
from msgspec.msgpack import Decoder

from transport.child import ProcessSettings
from transport.framing import MessageT
from transport.links.errors import LinkError, LinkRefusedError
from transport.logs import set_level
from transport.messages.base import Message, Refused, Welcome
from transport.messages.control import DumpStacks, SetLogLevel
from transport.messages.from_daemon import ToProcess
from transport.messages.telemetry import ProcessState, RequestRow, Snapshot
from transport.messages.to_daemon import CommandDone, FatalError, StateChanged
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


Control = DealerSocket[ToProcess | MessageT]


class DaemonLink(Generic[MessageT]):
    """Owner of the control and telemetry sockets of one process.

    `set_state`, `fatal` and `post` may be called from any thread.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        settings: ProcessSettings,
        metrics: MetricSet,
        notices: Decoder[ToProcess | MessageT],
    ) -> None:
        self._context = context
        self._settings = settings
        self._metrics = metrics
        self._notices = notices
        self._on_notice: Callable[[MessageT, list[zmq.Frame]], None] = lambda notice, frames: None
        self._sockets: tuple[CountingSocket, ...] = ()
        self._request_rows: Callable[[], list[RequestRow]] = list
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
        self._thread: threading.Thread | None = None

    def watch(
        self, *sockets: CountingSocket, request_rows: Callable[[], list[RequestRow]] = list
    ) -> None:
        """Report the traffic of these sockets besides its own two, and live requests (the router's).
        `request_rows` is called on the link's thread."""
        self._sockets, self._request_rows = sockets, request_rows

    @property
    def was_started(self) -> bool:
        return self._thread is not None

    def start(self, on_notice: Callable[[MessageT, list[zmq.Frame]], None]) -> None:
        """Connect and say hello. `on_notice` gets what the daemon sends, with its frames, on the
        link's thread.

        Raises:
            LinkRefusedError: another version or configuration, or not expected.
            LinkError: no answer in time.
        """
        self._on_notice = on_notice
        self._thread = threading.Thread(target=self._run, name="daemon-link", daemon=True)
        self._thread.start()
        if not self._welcomed.wait(self._settings.connect_seconds):
            raise LinkError(f"the daemon did not answer within {self._settings.connect_seconds} s")
        if self._refusal is not None:
            raise LinkRefusedError(f"the daemon refused this process: {self._refusal}")

    def set_state(self, state: ProcessState, detail: str = "") -> None:
        self._state, self._detail = state, detail
        self.post(StateChanged(state, detail))

    def fatal(self, reason: str) -> None:
        self.post(FatalError(reason))

    def post(self, message: Message, *frames: bytes) -> None:
        with self._lock:
            if len(self._outbox) < MAX_OUTBOX:
                self._outbox.append((message, frames))
        self._wake()

    def tick(self) -> None:
        self._progress += 1

    def close(self) -> None:
        """Send what is queued, close both sockets, end the thread. Idempotent."""
        self._closing = True
        self._wake()
        if self._thread is not None:
            self._thread.join(timeout=2 * LINGER_MS / 1000)

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        endpoints = Endpoints(self._settings.run_dir)
        control = DealerSocket(self._context, endpoints.control, self._settings.name, self._notices)
        telemetry = PublisherSocket(self._context, endpoints.telemetry, TELEMETRY_QUEUE)
        poller = zmq.Poller()
        poller.register(control.socket, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        try:
            control.send(self._settings.hello())
            while not self._closing:
                wait = max(self._next_snapshot - time.monotonic(), 0.0)
                poller.poll(round(wait * 1000))
                self._turn(control, telemetry)
            self._flush(control)
        finally:
            control.close()
            telemetry.close()

    def _turn(self, control: Control[MessageT], telemetry: PublisherSocket) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        control.receive(partial(self._receive, control))
        self._flush(control)
        now = time.monotonic()
        if now < self._next_snapshot:
            return
        self._next_snapshot = now + self._settings.heartbeat_seconds
        if not telemetry.publish(self._snapshot([control.stats(), telemetry.stats()])):
            log.debug("a snapshot was dropped: the daemon does not read")

    def _receive(
        self, control: Control[MessageT], received: Received[ToProcess | MessageT]
    ) -> None:
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
            case notice:
                self._on_notice(notice, received.frames)

    def _flush(self, control: Control[MessageT]) -> None:
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
            sockets=[*(socket.stats() for socket in self._sockets), *own_sockets],
            queues=self._metrics.read_queues(),
            requests=self._request_rows(),
        )
