"""The line to the router inside asyncio. A loss shows at the socket itself, without the daemon's word:
whoever waits for an answer of the router is told at once."""

from __future__ import annotations

import asyncio
import logging
from typing import Generic

import zmq
from zmq.utils.monitor import recv_monitor_message

from transport.fd_reader import AsyncDealer
from transport.framing import MessageT, Payload
from transport.links.errors import LinkError, RouterRefusedError
from transport.links.router import Greeting, RouterPeer
from transport.messages.base import Hello, HelloAnswer, Message, Welcome
from transport.sockets import DealerSocket, Received

_WATCHED = zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_SUCCEEDED

log = logging.getLogger(__name__)


class AsyncRouterLink(Generic[MessageT]):
    """Owner of the router's socket and of its monitor. Used on the loop's thread."""

    def __init__(
        self,
        dealer: DealerSocket[HelloAnswer | MessageT],
        hello: Hello,
        peer: RouterPeer[MessageT],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._dealer = dealer
        self._peer = peer
        self._greeting = Greeting(hello, self.send, peer)
        self._monitor = dealer.socket.get_monitor_socket(int(_WATCHED))
        self._reader: AsyncDealer[HelloAnswer | MessageT] | None = None
        self._is_lost = False
        self._welcomed: asyncio.Future[None] = self._loop.create_future()
        self.refusal: asyncio.Future[RouterRefusedError] = self._loop.create_future()
        """Why a router, the first one or a later one, does not take this process."""

    def send(self, message: Message, *frames: Payload) -> bool:
        """Send; False if the router is gone or does not read."""
        if self._reader is None or self._is_lost:
            return False
        return self._reader.send(message, *frames)

    async def open(self, seconds: float) -> None:
        """Say hello and wait for the answer, at most `seconds`.

        Raises:
            RouterRefusedError: the router does not take this process.
            LinkError: no answer in time.
        """
        self._reader = AsyncDealer(self._dealer, self._handle)
        self._loop.add_reader(self._monitor_fd, self._on_event)
        self._on_event()  # the descriptor signals only what comes after a first look
        self._greeting.greet()
        answers = (self._welcomed, self.refusal)
        await asyncio.wait(answers, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if self.refusal.done():
            raise self.refusal.result()
        if not self._welcomed.done():
            raise LinkError(f"the router did not answer within {seconds} s")

    async def close(self) -> None:
        """Send what is queued and close. Idempotent."""
        if self._dealer.socket.closed:
            return
        if self._reader is not None:
            self._loop.remove_reader(self._monitor_fd)
        self._dealer.socket.disable_monitor()
        if self._reader is not None:
            await self._reader.close()
        self._dealer.close()
        self._monitor.close(linger=0)

    @property
    def _monitor_fd(self) -> int:
        return int(self._monitor.getsockopt(zmq.FD))

    def _handle(self, received: Received[HelloAnswer | MessageT]) -> None:
        try:
            self._greeting.handle(received)
        except RouterRefusedError as error:
            if not self.refusal.done():
                self.refusal.set_result(error)
        if isinstance(received.message, Welcome) and not self._welcomed.done():
            self._welcomed.set_result(None)

    def _on_event(self) -> None:
        while int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.Event.DISCONNECTED and not self._is_lost:
                self._is_lost = True
                self._peer.on_router_lost()
            elif event == zmq.Event.HANDSHAKE_SUCCEEDED and self._is_lost:
                log.info("the router is back")
                self._is_lost = False
                self._greeting.greet()
