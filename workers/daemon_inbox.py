"""What the daemon tells a worker, kept for the worker's main loop."""

from __future__ import annotations

import logging
import threading
from collections import deque

from transport.ids import ROUTER_NAME
from transport.messages.control import CacheCommand
from transport.messages.from_daemon import PeerLost
from transport.sockets import Received

MAX_COMMANDS = 64

log = logging.getLogger(__name__)


class DaemonInbox:
    """Filled by the link's thread, emptied by the main loop."""

    def __init__(self) -> None:
        self.router_lost = threading.Event()
        """There is a new router, which does not know what this worker is working on."""
        self._commands: deque[CacheCommand] = deque(maxlen=MAX_COMMANDS)

    def notice(self, received: Received) -> None:
        match received.message:
            case PeerLost(name) if name == ROUTER_NAME:
                self.router_lost.set()
            case CacheCommand() as command:
                self._commands.append(command)
            case other:
                log.debug("the daemon sent a %s", type(other).__name__)

    def take_command(self) -> CacheCommand | None:
        """The oldest command about the prefix cache that was not carried out yet."""
        return self._commands.popleft() if self._commands else None
