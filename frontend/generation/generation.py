"""One prompt at the router, with its choices; tells a listener what comes."""

from __future__ import annotations

import asyncio
from typing import Protocol

from frontend.errors import ApiError
from frontend.generation.choice_stream import ChoiceStream
from frontend.generation.logprobs_format import TokenLogprob
from frontend.generation.request import Prompt
from frontend.metrics import FrontendMetrics
from transport.ids import RequestId
from transport.messages.generate import (
    ALL_CHOICES,
    FINISH_ABORT,
    FINISH_STOP,
    RUNNING,
    CancelCause,
    StageTimes,
)


class RouterCommands(Protocol):
    """What a generation asks of the router."""

    def cancel(self, request_id: RequestId, index: int, cause: CancelCause) -> None: ...

    def throttle(self, request_id: RequestId, index: int, paused: bool) -> None: ...

    def forget(self, request_id: RequestId) -> None: ...


class Listener(Protocol):
    """Gets what the choices of a request yield. Choice numbers are those that the client sees."""

    def on_token(self, number: int, text: str, logprob: TokenLogprob | None) -> None:
        """A token came; `text` may be empty, `logprob` is there where asked for."""
        ...

    def on_finish(self, number: int, reason: str) -> None: ...

    def on_failure(self, error: ApiError) -> None:
        """A prompt failed; nothing more comes of it."""
        ...


class Generation:
    """A submitted prompt. Owned by the loop's thread."""

    def __init__(
        self,
        request_id: RequestId,
        prompt: Prompt,
        first_number: int,
        choices: list[ChoiceStream],
        router: RouterCommands,
        listener: Listener,
        metrics: FrontendMetrics,
        received_at: float,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.choices = choices
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.started = False
        self.stages = StageTimes()
        self.first_token_at = 0.0
        self.closed = asyncio.Event()
        """Set when the router has closed its record, or nothing more is wanted of it."""
        self._open = len(choices)
        self._first_number = first_number
        self._router = router
        self._listener = listener
        self._metrics = metrics
        self._received_at = received_at

    @property
    def finished(self) -> bool:
        return self._open == 0

    def on_started(self, cached_tokens: int, prompt_tokens: int) -> None:
        """The first chunk of a choice ran. The first choice's numbers count."""
        if not self.started:
            self.started = True
            self.cached_tokens, self.prompt_tokens = cached_tokens, prompt_tokens

    def on_row(
        self,
        index: int,
        ids: list[int],
        finish: int,
        logprobs: list[TokenLogprob] | None,
        now: float,
    ) -> None:
        """Tokens of one choice came at `now` (CLOCK_MONOTONIC seconds), with the finish code of the
        last one, and an entry a token where logprobs were asked for."""
        choice = self.choices[index]
        if choice.finish_reason is not None or not self._open:
            return
        if finish == FINISH_ABORT:
            self.fail(ApiError(503, "The server gave the request up: send it again."))
            return
        self.first_token_at = self.first_token_at or now
        self._metrics.saw_tokens(choice, self._received_at, now, len(ids))
        if finish == RUNNING and logprobs is None and len(ids) == 1:
            text = choice.push(ids, RUNNING)
            if text:
                self._listener.on_token(self._first_number + index, text, None)
            if choice.finish_reason is not None:
                self._end(index, choice.finish_reason, at_router=False)
            return
        self._take_tokens(index, ids, finish, logprobs)

    def _take_tokens(
        self, index: int, ids: list[int], finish: int, logprobs: list[TokenLogprob] | None
    ) -> None:
        """The general case of `on_row`: token by token, so that each has an event of its own."""
        choice = self.choices[index]
        last = len(ids) - 1
        for position in range(max(len(ids), 1)):
            code = finish if position >= last else RUNNING
            text = choice.push(ids[position : position + 1], code)
            # An end-of-sequence or stop token is not shown, only what it sets free.
            is_shown = code != FINISH_STOP and bool(ids)
            if is_shown or text:
                entry = logprobs[position] if logprobs is not None and is_shown else None
                self._listener.on_token(self._first_number + index, text, entry)
            if choice.finish_reason is not None:
                self._end(index, choice.finish_reason, at_router=finish != RUNNING)
                return

    def on_closed(self, stages: StageTimes) -> None:
        """The router has closed its record. Before the end of all choices this is a failure: the
        rest would never come."""
        self.stages = stages
        self.closed.set()
        self.fail(ApiError(503, "The server gave the request up: send it again."))

    def fail(self, error: ApiError) -> None:
        """The prompt failed. Ignored after its end."""
        self.closed.set()
        if self._open:
            self._open = 0
            self._router.forget(self.request_id)
            self._listener.on_failure(error)

    def cancel(self, cause: CancelCause) -> None:
        """Nobody wants the rest: tell the router, once, if it is still at work."""
        if self._open:
            self._open = 0
            self._router.cancel(self.request_id, ALL_CHOICES, cause)
            self._router.forget(self.request_id)
        self.closed.set()

    def throttle(self, paused: bool) -> None:
        for index, choice in enumerate(self.choices):
            if choice.finish_reason is None and self._open:
                self._router.throttle(self.request_id, index, paused)

    def _end(self, index: int, reason: str, at_router: bool) -> None:
        self._open -= 1
        if not at_router:
            self._router.cancel(self.request_id, index, "stop")
        self._listener.on_finish(self._first_number + index, reason)
