"""The daemon's two sockets: control (hello, states, questions, commands) and telemetry.

What comes in is turned into calls of two handlers; what they return goes back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol, assert_never

import zmq

from daemon.inspection.command_relay import CommandError, CommandRelay
from transport.ids import ProcessName
from transport.logs import Seldom
from transport.messages.base import Hello, Message, Refused, Welcome
from transport.messages.control import CacheCommand, DumpStacks, ProcessCommand, SetLogLevel
from transport.messages.from_daemon import Answer
from transport.messages.telemetry import Snapshot
from transport.messages.to_daemon import (
    TO_DAEMON,
    CommandDone,
    FatalError,
    Query,
    ReloadKeys,
    StateChanged,
    StatusHeld,
    StopInstance,
    ToDaemon,
)
from transport.sockets import Endpoints, Received, RouterSocket, SubscriberSocket
from transport.telemetry.values import SocketStats

TELEMETRY_QUEUE = 10_000

log = logging.getLogger(__name__)


class QueryError(ValueError):
    """A question that the daemon cannot answer; the text goes to whoever asked."""


class ProcessHandler(Protocol):
    """Takes what the processes of the instance say."""

    def knows(self, hello: Hello) -> str | None: ...

    def welcomed(self, name: ProcessName) -> None: ...

    def state_changed(self, name: ProcessName, message: StateChanged) -> None: ...

    def status_held(self, name: ProcessName, serial: int) -> None:
        """A frontend acts on the `InstanceStatus` with this serial."""
        ...

    def fatal_error(self, name: ProcessName, reason: str) -> None:
        """A process ends for a reason that a restart would not cure."""
        ...

    def snapshot(self, snapshot: Snapshot) -> None: ...

    def living(self) -> Mapping[ProcessName, int]: ...


class OperatorHandler(Protocol):
    """Does what a person asks for at the command line."""

    def answer(self, what: str) -> bytes:
        """The answer to a question.

        Raises:
            QueryError: there is no such question.
        """
        ...

    def stop_requested(self, drain_timeout: float | None) -> None: ...

    def reload_keys(self) -> None:
        """Read the files of API keys again.

        Raises:
            QueryError: they cannot be used; the keys stay as they are.
        """
        ...


class ControlServer:
    """Owner of both sockets."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoints: Endpoints, config_hash: str
    ) -> None:
        self._config_hash = config_hash
        self._refused = Seldom()
        self._control = RouterSocket(context, endpoints.control, TO_DAEMON)
        self._relay = CommandRelay(self._control)
        self._telemetry = SubscriberSocket(context, endpoints.telemetry, TELEMETRY_QUEUE)

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self._control.socket, zmq.POLLIN)
        poller.register(self._telemetry.socket, zmq.POLLIN)

    def handle_incoming(self, processes: ProcessHandler, operator: OperatorHandler) -> None:
        self._control.receive(lambda received: self._handle(received, processes, operator))
        self._relay.give_up(time.monotonic())
        self._telemetry.receive(
            lambda received: processes.snapshot(received.message), TELEMETRY_QUEUE
        )

    def send(self, peer: ProcessName, message: Message) -> bool:
        return self._control.send(peer, message)

    def socket_stats(self) -> list[SocketStats]:
        return [self._control.stats(), self._telemetry.stats()]

    def close(self) -> None:
        self._control.close()
        self._telemetry.close()

    def _handle(
        self, received: Received[ToDaemon], processes: ProcessHandler, operator: OperatorHandler
    ) -> None:
        peer = received.peer
        match received.message:
            case Hello() as hello:
                problem = hello.problem("daemon", self._config_hash) or processes.knows(hello)
                if problem is not None:
                    self._refused.log(log, logging.ERROR, "refused %s: %s", peer, problem)
                    self._control.send(peer, Refused(problem))
                    return
                self._control.send(peer, Welcome())
                processes.welcomed(peer)
            case StateChanged() as change:
                processes.state_changed(peer, change)
            case StatusHeld(serial):
                processes.status_held(peer, serial)
            case FatalError(reason):
                processes.fatal_error(peer, reason)
            case Query(what, serial):
                self._answer(peer, what, serial, operator)
            case DumpStacks() | SetLogLevel() | CacheCommand() as command:
                self._carry_out(peer, command, processes)
            case CommandDone(serial):
                self._relay.done(peer, serial, received.frames)
            case StopInstance(drain_timeout, serial):
                self._control.send(peer, Answer(serial), b"{}")
                operator.stop_requested(drain_timeout)
            case ReloadKeys(serial):
                self._answer(peer, "keys", serial, operator, operator.reload_keys)
            case other:
                assert_never(other)

    def _answer(
        self,
        peer: ProcessName,
        what: str,
        serial: int,
        operator: OperatorHandler,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        try:
            before()
            self._control.send(peer, Answer(serial), operator.answer(what))
        except QueryError as error:
            self._control.send(peer, Answer(serial, str(error)), b"")

    def _carry_out(
        self, peer: ProcessName, command: ProcessCommand, processes: ProcessHandler
    ) -> None:
        try:
            self._relay.start(peer, command, processes.living(), time.monotonic())
        except CommandError as error:
            self._control.send(peer, Answer(command.serial, str(error)), b"")
