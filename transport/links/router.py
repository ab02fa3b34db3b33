"""A process's line to the router: greets it, and greets each router that takes its place."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import zmq

from transport.framing import MessageT, Payload
from transport.links.errors import RouterRefusedError
from transport.messages.base import Hello, HelloAnswer, Message, Refused, Welcome
from transport.sockets import DealerSocket, Received

MessageT_contra = TypeVar("MessageT_contra", bound=Message, contravariant=True)

log = logging.getLogger(__name__)


class RouterPeer(Protocol[MessageT_contra]):
    """What a process does with what comes from the router. A router that was restarted knows nothing
    of this process and of what it was working on."""

    def on_welcome(self) -> None:
        """The router, or the next one, takes this process."""
        ...

    def on_message(self, message: MessageT_contra, frames: list[zmq.Frame]) -> None: ...

    def on_router_lost(self) -> None:
        """Nothing that the router asked for is wanted any more; the next one is greeted."""
        ...


class Greeting(Generic[MessageT]):
    """The part of a line that knows no socket: says hello and understands the answer."""

    def __init__(
        self, hello: Hello, send: Callable[[Message], object], peer: RouterPeer[MessageT]
    ) -> None:
        self._hello = hello
        self._send = send
        self._peer = peer

    def greet(self) -> None:
        self._send(self._hello)

    def handle(self, received: Received[HelloAnswer | MessageT]) -> None:
        """Handle one message.

        Raises:
            RouterRefusedError: the router does not take this process.
        """
        match received.message:
            case Welcome():
                self._peer.on_welcome()
            case Refused(reason):
                raise RouterRefusedError(f"the router refused this process: {reason}")
            case message:
                self._peer.on_message(message, received.frames)


class RouterLink(Generic[MessageT]):
    """The line of a main loop, on its thread. Learns of a router's loss from the daemon."""

    def __init__(
        self,
        dealer: DealerSocket[HelloAnswer | MessageT],
        hello: Hello,
        peer: RouterPeer[MessageT],
        router_lost: threading.Event,
    ) -> None:
        """`dealer` stays the caller's. `router_lost` is set when there is a new router."""
        self._dealer = dealer
        self._peer = peer
        self._greeting = Greeting(hello, self.send, peer)
        self._router_lost = router_lost
        self._unsent: deque[tuple[Message, tuple[Payload, ...]]] = deque()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def connect(self, poller: zmq.Poller) -> None:
        """Say hello; `turn` handles the answer. `poller` wakes when something comes."""
        poller.register(self._dealer.socket, zmq.POLLIN)
        self._greeting.greet()

    def turn(self, limit: int = 1000) -> None:
        """Greet the new router if the old one was lost; handle what has come, at most `limit` messages.

        Raises:
            RouterRefusedError: the router does not take this process.
        """
        if self._router_lost.is_set():
            self._router_lost.clear()
            self._unsent.clear()  # what the old router did not take is not for the new one
            self._peer.on_router_lost()
            self._greeting.greet()
        self._dealer.receive(self._greeting.handle, limit)

    def send(self, message: Message, *frames: Payload) -> None:
        """Send as soon as the router takes it; the order is kept."""
        was_blocked = bool(self._unsent)
        self._unsent.append((message, frames))
        if not self.flush() and not was_blocked:
            log.warning("the router does not read: this process waits for it")

    def flush(self) -> bool:
        """Send what is unsent; whether all of it could be."""
        while self._unsent and self._dealer.can_send:
            message, frames = self._unsent[0]
            if not self._dealer.send(message, *frames):
                break
            self._unsent.popleft()
        return not self._unsent
