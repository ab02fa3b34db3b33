"""What the daemon tells a worker, kept for the worker's main loop."""

from __future__ import annotations

import threading
from collections import deque
from typing import assert_never

import zmq

from transport.messages.control import CacheCommand
from transport.messages.from_daemon import PeerLost, WorkerNotice

MAX_COMMANDS = 64


class DaemonInbox:
    """The link's thread fills it; the main loop empties it."""

    def __init__(self) -> None:
        self.router_lost = threading.Event()
        """There is a new router, which does not know what this worker is working on."""
        self._commands: deque[CacheCommand] = deque(maxlen=MAX_COMMANDS)

    def take(self, notice: WorkerNotice, _frames: list[zmq.Frame]) -> None:
        match notice:
            case PeerLost():  # a worker is told of the router only
                self.router_lost.set()
            case CacheCommand() as command:
                self._commands.append(command)
            case other:
                assert_never(other)

    def take_command(self) -> CacheCommand | None:
        return self._commands.popleft() if self._commands else None
