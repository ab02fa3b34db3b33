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
        post: Callable[[Message], None],
        take: Callable[[InstanceStatus | Drain], None],
    ) -> None:
        """`take` is called on the loop's thread."""
        self._loop = asyncio.get_running_loop()
        self._post = post
        self._take = take
        self._serials = itertools.count(1)
        self._open: dict[int, asyncio.Future[bytes]] = {}

    async def ask(self, question: Query | CacheCommand) -> bytes:
        """The daemon's answer; `question` gets its serial here.

        Raises:
            ApiError: 503; no answer in time, too many questions at once, or the daemon refused.
        """
        if len(self._open) >= MAX_OPEN_QUERIES:
            raise ApiError(503, "Too many questions at once: ask again soon.", retry_after=1)
        serial = next(self._serials)
        future: asyncio.Future[bytes] = self._loop.create_future()
        self._open[serial] = future
        try:
            self._post(msgspec.structs.replace(question, serial=serial))
            return await asyncio.wait_for(future, ANSWER_SECONDS)
        except TimeoutError as error:
            raise ApiError(
                503, f"The daemon did not answer within {ANSWER_SECONDS:g} s.", retry_after=1
            ) from error
        finally:
            del self._open[serial]

    def on_notice(self, notice: FrontendNotice, frames: list[zmq.Frame]) -> None:
        match notice:
            case InstanceStatus() | Drain():
                self._later(self._take, notice)
            case Answer():
                body = bytes(frames[0].buffer) if frames else b""
                self._later(self._answered, notice, body)
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
