"""The line to the process that reads large bodies: to decode one holds the interpreter's lock, and
neither the event loop nor the heartbeat may stand still so long."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import msgspec

from frontend.errors import ApiError
from frontend.generation.request import ModelLimits
from transport.child import ProcessSettings
from transport.launch import python_command

SHORT_BYTES: Final = 1 << 20
"""A body of this size is read within a quarter of a second on a quiet machine, whatever it holds."""
READ_SECONDS = 60.0
"""How long one body may take. On a quiet machine it takes two seconds at most; on a busy one the process
gives way to others. A process that takes longer is replaced."""
WAIT_SECONDS = 60.0
"""How long a body may wait for those before it."""
END_SECONDS = 5.0
REQUEST: Final = struct.Struct("<IQ")
"""Sizes of an `Errand` in msgpack and of the body, both of which follow."""
REPLY: Final = struct.Struct("<BQ")
"""Whether the body was refused, and the size of what follows: what it asks for, or the `Refusal`."""

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BodyForm(Generic[T]):
    """One kind of body."""

    name: str
    read: Callable[[bytes, ModelLimits], T]
    """Raises ApiError (400 or 404), naming the field."""
    decoder: msgspec.msgpack.Decoder[T]
    """For what `read` returned in another process."""


def body_form(name: str, read: Callable[[bytes, ModelLimits], T], result: type[T]) -> BodyForm[T]:
    return BodyForm(name, read, msgspec.msgpack.Decoder(result))


class Errand(msgspec.Struct, frozen=True):
    form: str
    limits: ModelLimits


class Refusal(msgspec.Struct, frozen=True):
    """An `ApiError` that travels."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None

    def error(self) -> ApiError:
        return ApiError(self.status, self.message, param=self.param, code=self.code)


_REFUSAL: Final = msgspec.msgpack.Decoder(Refusal)


class BodyReader:
    """Owner of two processes, each started for its first body: what is read in a moment never waits for
    what takes seconds. Used on the loop's thread."""

    def __init__(self, process: ProcessSettings) -> None:
        """`process`: the frontend's own."""
        arguments = (process.name, process.instance, process.log_level)
        self._long = _Line(arguments)
        self._short = _Line(arguments)

    async def read(self, form: BodyForm[T], body: bytes | bytearray, limits: ModelLimits) -> T:
        """
        Raises:
            ApiError: what `form.read` raises; or 503, the process does not answer.
        """
        line = self._long if len(body) > SHORT_BYTES else self._short
        return form.decoder.decode(await line.read(Errand(form.name, limits), body))

    async def close(self) -> None:
        """Nobody reads any more."""
        await asyncio.gather(self._long.close(), self._short.close())


class _Line:
    """One body after the other; the budget for bodies bounds how many wait."""

    def __init__(self, arguments: tuple[str, ...]) -> None:
        self._arguments = arguments
        self._turn = asyncio.Lock()
        self.process: _ReaderProcess | None = None

    async def read(self, errand: Errand, body: bytes | bytearray) -> bytes:
        """
        Raises:
            ApiError: the body is refused; or 503.
        """
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._turn.acquire()
        except TimeoutError as error:
            raise _busy("Too many large bodies are waiting") from error
        # A caller that is cancelled leaves the exchange to its end: the next one needs whole frames.
        exchange = asyncio.ensure_future(self._exchange(errand, body))
        exchange.add_done_callback(self._end_turn)
        try:
            return await asyncio.shield(exchange)
        finally:
            del exchange  # holds the error, whose traceback holds this frame, and with it the body

    async def close(self) -> None:
        if self.process is not None:
            process, self.process = self.process, None
            await process.end()

    def _end_turn(self, exchange: asyncio.Future[bytes]) -> None:
        self._turn.release()
        if not exchange.cancelled():
            exchange.exception()  # its caller may have gone

    async def _exchange(self, errand: Errand, body: bytes | bytearray) -> bytes:
        try:
            if self.process is None:
                self.process = await _ReaderProcess.start(self._arguments)
            async with asyncio.timeout(READ_SECONDS):
                is_refused, reply = await self.process.ask(errand, body)
        except (OSError, EOFError, TimeoutError) as error:
            log.error("the process that reads large bodies is lost: %r", error)
            await self.close()
            raise _busy("The process that reads large bodies was lost") from error
        if is_refused:
            raise _REFUSAL.decode(reply).error()
        return reply


class _ReaderProcess:
    """`frontend/body_reader.py`, which ends when the socket closes that is its standard input."""

    def __init__(
        self,
        popen: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._popen = popen
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, arguments: tuple[str, ...]) -> _ReaderProcess:
        ours, theirs = socket.socketpair()
        try:
            popen = _spawn(theirs, arguments)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        return cls(popen, reader, writer)

    async def ask(self, errand: Errand, body: bytes | bytearray) -> tuple[bool, bytes]:
        head = msgspec.msgpack.encode(errand)
        self._writer.write(REQUEST.pack(len(head), len(body)) + head)
        self._writer.write(body)
        is_refused, size = REPLY.unpack(await self._reader.readexactly(REPLY.size))
        return bool(is_refused), await self._reader.readexactly(size)

    async def end(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        try:
            await asyncio.to_thread(self._popen.wait, END_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            await asyncio.to_thread(self._popen.wait)


def _spawn(line: socket.socket, arguments: tuple[str, ...]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        python_command("frontend.body_reader", *arguments),
        stdin=line.fileno(),
        stdout=subprocess.DEVNULL,
    )


def _busy(reason: str) -> ApiError:
    return ApiError(503, f"{reason}: try again soon.", code="too_many_bodies", retry_after=1)
