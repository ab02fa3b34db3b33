"""The bytes of one streamed answer that wait to be sent, and what happens when nobody reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from frontend.http.sse import KEEP_ALIVE

KEEP_ALIVE_SECONDS = 15.0


class StreamBuffer:
    """One writer, one sender. `append` costs a list append; the sender is woken once for all that
    comes within a turn of the loop, and sends it in one piece."""

    __slots__ = (
        "_blocked_since",
        "_chunks",
        "_high_water",
        "_idle_since",
        "_is_ended",
        "_loop",
        "_on_pressure",
        "_paused_since",
        "_waiter",
        "size",
    )

    def __init__(self, high_water: int, on_pressure: Callable[[bool], None], now: float) -> None:
        """`on_pressure(True)` is called when more than `high_water` bytes are unread,
        `on_pressure(False)` when less than half of that is left."""
        self._loop = asyncio.get_running_loop()
        self._chunks: list[bytes] = []
        self.size = 0
        self._high_water = high_water
        self._on_pressure = on_pressure
        self._is_ended = False
        self._waiter: asyncio.Future[None] | None = None
        self._idle_since = now
        self._blocked_since: float | None = None
        self._paused_since: float | None = None

    @property
    def is_drained(self) -> bool:
        return self._is_ended and not self._chunks

    def append(self, data: bytes) -> None:
        self._chunks.append(data)
        self.size += len(data)
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)
        if self.size > self._high_water and self._paused_since is None:
            self._paused_since = self._loop.time()
            self._on_pressure(True)

    def end(self) -> None:
        self._is_ended = True
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def take(self) -> bytes:
        """All that is queued; waits until there is something. Empty at the end."""
        self._blocked_since = None
        if not self._chunks and not self._is_ended:
            self._waiter = self._loop.create_future()
            await self._waiter
        data = b"".join(self._chunks)
        self._chunks.clear()
        self.size = 0
        self._idle_since = self._blocked_since = self._loop.time()
        return data

    def sent(self) -> None:
        """The connection has accepted what `take` returned."""
        self._blocked_since = None
        if self._paused_since is not None and self.size <= self._high_water // 2:
            self._paused_since = None
            self._on_pressure(False)

    def tick(self, now: float, patience: float) -> bool:
        """Keep a silent stream alive. Returns whether the client has read nothing for more than
        `patience` seconds."""
        if self._is_ended and not self._chunks and self._blocked_since is None:
            return False
        for since in (self._blocked_since, self._paused_since):
            if since is not None and now - since > patience:
                return True
        if self._blocked_since is None and now - self._idle_since >= KEEP_ALIVE_SECONDS:
            self._idle_since = now
            self.append(KEEP_ALIVE)
        return False
