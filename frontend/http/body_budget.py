"""How many bytes of bodies a frontend holds at once that have not been read into requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Final

from frontend.errors import ApiError

UNCOUNTED_BYTES: Final = 65_536
"""What each body may have without being counted: as much as the HTTP server buffers of every connection,
and enough for most. So large bodies never keep small ones out."""


class BodyBudget:
    """Used on the loop's thread."""

    def __init__(self, max_bytes: int, retry_after: int) -> None:
        """`retry_after` is in seconds."""
        self._max_bytes = max_bytes
        self._retry_after = retry_after
        self._shares: set[BodyShare] = set()
        self.held = 0
        """Bytes that count."""

    @contextlib.contextmanager
    def share(self) -> Iterator[BodyShare]:
        """The share of one body, which ends with the block."""
        share = BodyShare(self)
        self._shares.add(share)
        try:
            yield share
        finally:
            self._shares.discard(share)
            self.held -= share.counted

    def make_room(self) -> None:
        """Give up the largest bodies that still arrive, until the others fit."""
        while self.held > self._max_bytes:
            arriving = (share for share in self._shares if share.is_arriving)
            max(arriving, key=lambda share: share.counted).give_up()

    def error(self) -> ApiError:
        return ApiError(
            503,
            f"The server holds more than {self._max_bytes} bytes of bodies that still arrive: this "
            "one was the largest. Try again soon.",
            code="too_many_bodies",
            retry_after=self._retry_after,
        )


class BodyShare:
    """What one body takes of the budget."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._size = 0
        self._timeout: asyncio.Timeout | None = None
        self._is_given_up = False

    @property
    def counted(self) -> int:
        return 0 if self._is_given_up else max(0, self._size - UNCOUNTED_BYTES)

    @property
    def is_arriving(self) -> bool:
        return self._timeout is not None and not self._is_given_up

    @contextlib.asynccontextmanager
    async def arriving(self, seconds: float) -> AsyncIterator[None]:
        """The time in which the body arrives, and may be given up for others.

        Raises:
            ApiError: 503, it was given up.
            TimeoutError: it took more than `seconds`.
        """
        try:
            async with asyncio.timeout(seconds) as self._timeout:
                yield
        except TimeoutError:
            if not self._is_given_up:
                raise
        finally:
            self._timeout = None
        if self._is_given_up:
            raise self._budget.error()

    def take(self, count: int) -> None:
        """Count `count` more bytes of an arriving body.

        Raises:
            ApiError: 503, there is no room, and no larger body to give up for this one.
        """
        before = self.counted
        self._size += count
        self._budget.held += self.counted - before
        self._budget.make_room()
        if self._is_given_up:
            raise self._budget.error()

    def give_up(self) -> None:
        self._budget.held -= self.counted
        self._is_given_up = True
        if self._timeout is not None:
            self._timeout.reschedule(asyncio.get_running_loop().time())
