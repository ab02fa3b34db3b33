"""A DEALER socket inside asyncio, read from its file descriptor.

`zmq.asyncio` costs five to ten times as much per message. The descriptor is edge-triggered: it
signals a change of state once. So every wake-up drains the socket until it is empty, and a send,
which may swallow an edge while it handles the socket's internal commands, is followed by a drain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic

from transport.framing import MessageT, Payload
from transport.messages.base import Message
from transport.sockets import DealerSocket, Received

BATCH = 256
"""Messages handled per turn of the event loop, so that a flood leaves room for HTTP."""


class AsyncDealer(Generic[MessageT]):
    """Calls `handler` for each received message, on the loop's thread."""

    def __init__(
        self, dealer: DealerSocket[MessageT], handler: Callable[[Received[MessageT]], None]
    ) -> None:
        self._dealer = dealer
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._scheduled = False
        self._closed = False
        self._fd = dealer.fd
        self._loop.add_reader(self._fd, self._drain)
        self._schedule()

    def send(self, message: Message, *frames: Payload) -> bool:
        accepted = self._dealer.send(message, *frames)
        self._schedule()
        return accepted

    async def close(self) -> None:
        """Stop reading, then close the socket. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._fd)
        # uvloop deregisters on its next turn; closing before that could hit a reused descriptor.
        await asyncio.sleep(0)
        self._dealer.close()

    def _schedule(self) -> None:
        if not self._scheduled and not self._closed:
            self._scheduled = True
            self._loop.call_soon(self._scheduled_drain)

    def _scheduled_drain(self) -> None:
        self._scheduled = False
        self._drain()

    def _drain(self) -> None:
        if not self._closed and self._dealer.receive(self._handler, BATCH) == BATCH:
            self._schedule()
