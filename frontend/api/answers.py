"""Where the deltas of a job go: into one answer, or into the events of a stream."""

from __future__ import annotations

import asyncio

from frontend.api.dialect import AnswerWriter
from frontend.errors import ApiError
from frontend.generation.collected import CollectedChoice
from frontend.generation.deltas import Delta, Finish
from frontend.http.stream_buffer import StreamBuffer


class CollectedAnswer:
    """Collects all choices."""

    def __init__(self, choices: int) -> None:
        self._choices = [CollectedChoice() for _ in range(choices)]
        self._open = choices
        self._error: ApiError | None = None
        self._done = asyncio.Event()

    def write(self, number: int, delta: Delta) -> None:
        self._choices[number].add(delta)
        if isinstance(delta, Finish):
            self._open -= 1
            if not self._open:
                self._done.set()

    def fail(self, error: ApiError) -> None:
        self._error = self._error or error
        self._done.set()

    def leave(self) -> None:
        self._done.set()

    async def result(self) -> list[CollectedChoice] | None:
        """Waits for all choices; None if the client left first. Raises ApiError if a prompt failed."""
        await self._done.wait()
        if self._error is not None:
            raise self._error
        return self._choices if not self._open else None


class StreamedAnswer:
    """Writes events into a buffer as deltas come."""

    def __init__(self, choices: int, writer: AnswerWriter, buffer: StreamBuffer) -> None:
        self._open = choices
        self._events = writer.events
        self._writer = writer
        self._buffer = buffer
        self._has_begun = False
        self.early_error: ApiError | None = None
        """Why there is no stream at all."""

    def write(self, number: int, delta: Delta) -> None:
        data = self._events(number, delta)
        if data:
            self._buffer.append(data)
        if type(delta) is Finish:
            self._open -= 1
            if not self._open:
                self._buffer.append(self._writer.end())
                self._buffer.end()

    def fail(self, error: ApiError) -> None:
        """The error takes the place of the stream, or is its last event."""
        if self._has_begun or self._buffer.size:
            self._buffer.append(self._writer.failure(error))
        else:
            self.early_error = self.early_error or error
        self._buffer.end()

    def begin(self) -> None:
        """The headers are out: from now on an error is an event."""
        self._has_begun = True
