"""Notice that a client goes away while its request is being worked on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import TypeVar

from starlette.types import Receive

from frontend.errors import ClientGone

T = TypeVar("T")


class DisconnectWatch:
    """Calls `on_gone` once if the connection closes within the `async with` block.

    One task a request waits for it. The body must have been read before."""

    def __init__(self, receive: Receive, on_gone: Callable[[], object]) -> None:
        self._receive = receive
        self._on_gone = on_gone
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._on_gone()


async def unless_gone(receive: Receive, work: Coroutine[None, None, T]) -> T:
    """What `work` yields; it is cancelled when the client leaves. The body must have been read before.

    Raises:
        ClientGone: the client left.
    """
    task = asyncio.ensure_future(work)
    async with DisconnectWatch(receive, task.cancel):
        await asyncio.wait([task])
    if task.cancelled():
        raise ClientGone
    try:
        return task.result()
    finally:
        del (
            task
        )  # holds the error, whose traceback holds this frame, and with it the request's body
