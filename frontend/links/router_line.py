"""The socket to the router, watched: a router that restarts is greeted anew."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from frontend.errors import ApiError
from frontend.links.router_client import RouterClient
from transport.child import ProcessSettings
from transport.fd_reader import AsyncDealer
from transport.framing import Payload
from transport.links.daemon import LinkError, RouterRefusedError
from transport.messages.base import PROTOCOL_VERSION, Hello, Message
from transport.sockets import DealerSocket, Endpoints, Received
from transport.telemetry.values import SocketStats

LOST = "The server's router was lost: try again soon."
RETRY_AFTER_SECONDS = 1
_WATCHED = zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_SUCCEEDED

log = logging.getLogger(__name__)


class RouterLine:
    """Owner of the router's socket and of its monitor."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        settings: ProcessSettings,
        on_lost: Callable[[], None],
    ) -> None:
        """`on_lost` is called when the router is gone; it is greeted anew as soon as it is back."""
        self._settings = settings
        self._on_lost = on_lost
        self._dealer = DealerSocket(context, Endpoints(settings.run_dir).router, settings.name)
        self._monitor = self._dealer.socket.get_monitor_socket(int(_WATCHED))
        self._reader: AsyncDealer | None = None
        self._client: RouterClient | None = None
        self._loop = asyncio.get_running_loop()
        self._is_lost = False

    def send(self, message: Message, *frames: Payload) -> bool:
        """Send; False if the router does not read."""
        if self._reader is None or self._is_lost:
            return False
        return self._reader.send(message, *frames)

    def stats(self) -> SocketStats:
        """Traffic so far. From any thread."""
        return self._dealer.stats()

    async def open(self, client: RouterClient, on_message: Callable[[Received], None]) -> None:
        """Say hello and wait for the answer.

        Raises:
            RouterRefusedError: it does not take this process.
            LinkError: no answer in time.
        """
        self._client = client
        self._reader = AsyncDealer(self._dealer, on_message)
        self._loop.add_reader(self._monitor_fd, self._on_event)
        self._on_event()  # the descriptor signals only what comes after a first look
        self._greet()
        seconds = self._settings.connect_seconds
        try:
            await asyncio.wait_for(client.welcomed.wait(), seconds)
        except TimeoutError as error:
            raise LinkError(f"the router did not answer within {seconds} s") from error
        if client.refusal is not None:
            raise RouterRefusedError(f"the router refused this process: {client.refusal}")

    async def close(self) -> None:
        """Send what is queued and close. Idempotent."""
        if self._reader is None:
            return
        reader, self._reader = self._reader, None
        self._loop.remove_reader(self._monitor_fd)
        self._dealer.socket.disable_monitor()
        await reader.close()
        self._monitor.close(linger=0)

    @property
    def _monitor_fd(self) -> int:
        return int(self._monitor.getsockopt(zmq.FD))

    def _greet(self) -> None:
        settings = self._settings
        self.send(
            Hello(PROTOCOL_VERSION, settings.role, settings.name, os.getpid(), settings.config_hash)
        )

    def _on_event(self) -> None:
        while int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.Event.DISCONNECTED and not self._is_lost:
                self._is_lost = True
                self._router_lost()
            elif event == zmq.Event.HANDSHAKE_SUCCEEDED and self._is_lost:
                log.info("the router is back")
                self._is_lost = False
                self._greet()

    def _router_lost(self) -> None:
        if self._client is None or self._reader is None:
            return
        log.warning("lost the router; answering 503 until it is back")
        self._on_lost()
        self._client.model = None
        self._client.fail_all(
            ApiError(503, LOST, code="router_lost", retry_after=RETRY_AFTER_SECONDS)
        )
