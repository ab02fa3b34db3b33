"""Questions to the daemon, asked from the event loop and answered through the link's thread."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, assert_never

import msgspec
import zmq

from frontend.errors import ApiError
from transport.messages.base import Message
from transport.messages.control import CacheCommand
from transport.messages.from_daemon import Answer, Drain, FrontendNotice, InstanceStatus
from transport.messages.to_daemon import Query

ANSWER_SECONDS: Final = 5.0
SHARED_SECONDS: Final = 1.0
"""Who asks the same so soon after another waits for that answer. So questions are few however many ask."""
MAX_OPEN_COMMANDS: Final = 16
"""They take up to two seconds each, and are never shared: each begins after it was asked for."""


@dataclass
class _Asked:
    question: Query | CacheCommand
    at: float
    """By the loop's clock."""
    waiting: set[asyncio.Future[bytes]] = field(default_factory=set)


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
        self._open: dict[int, _Asked] = {}

    async def ask(self, question: Query | CacheCommand) -> bytes:
        """The daemon's answer; `question` gets its serial here.

        Raises:
            ApiError: 503; no answer in time, too many commands at once, or the daemon refused.
        """
        serial = self._find_same(question)
        if serial is None:
            serial = self._begin(question)
        waiting = self._open[serial].waiting
        future: asyncio.Future[bytes] = self._loop.create_future()
        waiting.add(future)
        try:
            return await asyncio.wait_for(future, ANSWER_SECONDS)
        except TimeoutError as error:
            raise ApiError(
                503, f"The daemon did not answer within {ANSWER_SECONDS:g} s.", retry_after=1
            ) from error
        finally:
            waiting.remove(future)
            if not waiting:
                self._open.pop(serial, None)

    def _find_same(self, question: Query | CacheCommand) -> int | None:
        if isinstance(question, CacheCommand):
            return None
        youngest = self._loop.time() - SHARED_SECONDS
        for serial, asked in self._open.items():
            if asked.question == question and asked.at > youngest:
                return serial
        return None

    def _begin(self, question: Query | CacheCommand) -> int:
        commands = sum(isinstance(asked.question, CacheCommand) for asked in self._open.values())
        if isinstance(question, CacheCommand) and commands >= MAX_OPEN_COMMANDS:
            raise ApiError(
                503, f"{commands} caches are being emptied already: ask again soon.", retry_after=1
            )
        serial = next(self._serials)
        self._open[serial] = _Asked(question, self._loop.time())
        self._post(msgspec.structs.replace(question, serial=serial))
        return serial

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
        asked = self._open.pop(answer.serial, None)
        for future in [] if asked is None else asked.waiting:
            if future.done():
                continue
            if answer.error:
                error = ApiError(503, f"The daemon answered: {answer.error}.", retry_after=1)
                future.set_exception(error)
            else:
                future.set_result(body)
