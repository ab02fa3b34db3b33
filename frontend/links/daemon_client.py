"""Questions to the daemon, asked from the event loop and answered through the link's thread."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import assert_never

import msgspec
import zmq

from frontend.errors import ApiError
from transport.messages.base import Message
from transport.messages.control import CacheCommand
from transport.messages.from_daemon import Answer, Drain, FrontendNotice, InstanceStatus
from transport.messages.to_daemon import Query

ANSWER_SECONDS = 5.0
MAX_OPEN_QUERIES = 64


class DaemonClient:
    """`on_notice` runs on the link's thread, everything else on the loop's."""

    def __init__(
        self,
        on_status: Callable[[InstanceStatus], None],
        on_drain: Callable[[], None],
    ) -> None:
        """Both callbacks run on the loop's thread."""
        self._loop = asyncio.get_running_loop()
        self._on_status = on_status
        self._on_drain = on_drain
        self._serials = itertools.count(1)
        self._open: dict[int, asyncio.Future[bytes]] = {}

    async def ask(self, question: Query | CacheCommand, post: Callable[[Message], None]) -> bytes:
        """The daemon's answer to a question or command; its serial is set here.

        Raises:
            ApiError: 503; no answer in time, too many questions at once, or the daemon refused.
        """
        if len(self._open) >= MAX_OPEN_QUERIES:
            raise ApiError(503, "Too many questions at once: ask again soon.", retry_after=1)
        serial = next(self._serials)
        future: asyncio.Future[bytes] = self._loop.create_future()
        self._open[serial] = future
        try:
            post(msgspec.structs.replace(question, serial=serial))
            return await asyncio.wait_for(future, ANSWER_SECONDS)
        except TimeoutError as error:
            raise ApiError(
                503, f"The daemon did not answer within {ANSWER_SECONDS:g} s.", retry_after=1
            ) from error
        finally:
            del self._open[serial]

    def on_notice(self, notice: FrontendNotice, frames: list[zmq.Frame]) -> None:
        """Take what the daemon says, on the link's thread."""
        match notice:
            case InstanceStatus() as status:
                self._later(self._on_status, status)
            case Drain():
                self._later(self._on_drain)
            case Answer() as answer:
                body = bytes(frames[0].buffer) if frames else b""
                self._later(self._answered, answer, body)
            case other:
                assert_never(other)

    def _later(self, callback: Callable[..., None], *arguments: object) -> None:
        # The loop is closed if the process is on its way out: nobody needs the news then.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _answered(self, answer: Answer, body: bytes) -> None:
        future = self._open.get(answer.serial)
        if future is None or future.done():
            return
        if answer.error:
            future.set_exception(ApiError(503, f"The daemon answered: {answer.error}."))
        else:
            future.set_result(body)
