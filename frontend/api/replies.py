"""What happens to the tokens of a job: collected into one answer, or streamed as events."""

from __future__ import annotations

import asyncio

from frontend.api.reply_format import ReplyFormat, WholeChoice
from frontend.errors import ApiError
from frontend.generation.job import Job
from frontend.generation.logprobs_format import TokenLogprob
from frontend.generation.usage import Usage
from frontend.http.sse import DONE, EventTemplate, event
from frontend.http.stream_buffer import StreamBuffer


def _token_start(job: Job, number: int) -> int:
    """Where the text of the latest token of a choice begins: a stop string may hold text back that is
    not shown yet, but counts."""
    prompt, index = divmod(number, job.request.common.n)
    return job.generations[prompt].choices[index].token_start


class WholeReply:
    """Collects all choices."""

    def __init__(self, job: Job, reply_format: ReplyFormat) -> None:
        self._job = job
        self._format = reply_format
        self._choices = [WholeChoice() for _ in range(job.choices)]
        self._error: ApiError | None = None
        self._done = asyncio.Event()

    def on_token(self, number: int, text: str, logprob: TokenLogprob | None) -> None:
        choice = self._choices[number]
        if logprob is not None:
            choice.logprobs.append(logprob)
            choice.offsets.append(_token_start(self._job, number))
        if text:
            choice.parts.append(text)

    def on_finish(self, number: int, reason: str) -> None:
        """Keep the reason; the last one ends it all."""
        self._choices[number].finish_reason = reason
        self._job.choice_finished(reason)
        if self._job.finished:
            self._done.set()

    def on_failure(self, error: ApiError) -> None:
        self._error = self._error or error
        self._job.give_up()
        self._done.set()

    def leave(self) -> None:
        self._job.cancel("client")
        self._done.set()

    async def result(self) -> bytes:
        """The answer's body. Empty if the client left.

        Raises:
            ApiError: a prompt failed.
        """
        await self._done.wait()
        if self._error is not None:
            raise self._error
        if self._job.cancelled is not None:
            return b""
        return self._format.whole(self._choices, self._job.usage())


class _StreamedChoice:
    __slots__ = ("is_open", "template")

    def __init__(self, template: EventTemplate) -> None:
        self.template = template
        self.is_open = False


class StreamedReply:
    """Writes events into a buffer as tokens come."""

    def __init__(self, job: Job, reply_format: ReplyFormat, buffer: StreamBuffer) -> None:
        self._job = job
        self._format = reply_format
        self._buffer = buffer
        self._choices = [
            _StreamedChoice(reply_format.template(number)) for number in range(job.choices)
        ]
        common = job.request.common
        self._include_usage = common.include_usage
        self._continuous_usage = common.continuous_usage
        self._has_begun = False
        self.early_error: ApiError | None = None
        """Why there is no stream at all."""

    def on_token(self, number: int, text: str, logprob: TokenLogprob | None) -> None:
        """One event a token; none for a token that shows nothing yet."""
        choice = self._choices[number]
        if not choice.is_open:
            self._open(number, choice)
        if logprob is None and not self._continuous_usage:
            if text:
                self._buffer.append(choice.template.fill(text))
        elif text or logprob is not None:
            offset = _token_start(self._job, number)
            self._buffer.append(
                self._format.token(number, text, logprob, offset, self._usage_now())
            )

    def on_finish(self, number: int, reason: str) -> None:
        """The choice's last event; after the last choice, the stream's."""
        choice = self._choices[number]
        if not choice.is_open:
            self._open(number, choice)
        self._buffer.append(self._format.finish(number, reason, self._usage_now()))
        self._job.choice_finished(reason)
        if self._job.finished:
            if self._include_usage:
                self._buffer.append(self._format.usage(self._job.usage()))
            self._buffer.append(DONE)
            self._buffer.end()

    def on_failure(self, error: ApiError) -> None:
        """An error in place of the stream, or its last event."""
        self._job.give_up()
        if self._has_begun:
            self._buffer.append(event(error.value()))
            self._buffer.append(DONE)
        else:
            self.early_error = self.early_error or error
        self._buffer.end()

    def begin(self) -> None:
        """The headers are out: from here on errors are events."""
        self._has_begun = True

    def leave(self) -> None:
        self._job.cancel("client")
        self._buffer.end()

    def _open(self, number: int, choice: _StreamedChoice) -> None:
        choice.is_open = self._has_begun = True
        opening = self._format.opening(number, self._usage_now())
        if opening:
            self._buffer.append(opening)

    def _usage_now(self) -> Usage | None:
        return self._job.usage() if self._continuous_usage else None
