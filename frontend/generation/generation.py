"""One prompt at the router, with its choices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from frontend.errors import ApiError
from frontend.generation.choice import Choice
from frontend.generation.deltas import Delta
from frontend.generation.request import Prompt
from frontend.metrics import FrontendMetrics
from transport.ids import RequestId
from transport.logprobs import TokenLogprob
from transport.messages.generate import ALL_CHOICES, RUNNING, CancelCause, StageTimes

GIVEN_UP = "The server gave the request up: send it again."


class RouterCommands(Protocol):
    """What a generation asks of the router."""

    def cancel(self, request_id: RequestId, index: int, cause: CancelCause) -> None: ...

    def throttle(self, request_id: RequestId, index: int, paused: bool) -> None: ...

    def forget(self, request_id: RequestId) -> None: ...


class Generation:
    """A submitted prompt. Owned by the loop's thread."""

    def __init__(
        self,
        request_id: RequestId,
        prompt: Prompt,
        first_number: int,
        choices: list[Choice],
        router: RouterCommands,
        write: Callable[[int, Delta], None],
        on_failure: Callable[[ApiError], None],
        metrics: FrontendMetrics,
        received_at: float,
    ) -> None:
        """`write` gets the deltas of choice i as number `first_number` + i."""
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
        self._write = write
        self._on_failure = on_failure
        self._metrics = metrics
        self._received_at = received_at

    @property
    def finished(self) -> bool:
        return self._open == 0

    def on_started(self, cached_tokens: int, prompt_tokens: int) -> None:
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
        """Take the tokens that one choice got at `now`, in CLOCK_MONOTONIC seconds.

        `finish` is the code of the last token. `logprobs` has an entry for each token, and is used up
        here; it is None if the request asked for none.
        """
        choice = self.choices[index]
        if choice.finish_reason is not None or not self._open:
            return
        self.first_token_at = self.first_token_at or now
        self._metrics.saw_tokens(choice.last_at, self._received_at, now, len(ids))
        choice.last_at = now
        number = self._first_number + index
        # Token by token, so that each gets an event of its own. An empty row still tells the end.
        tokens = [ids] if len(ids) < 2 else [[token] for token in ids]
        for token in tokens:
            code = finish if token is tokens[-1] else RUNNING
            entry = logprobs.pop(0) if logprobs else None
            for delta in choice.push(token, code, entry):
                self._write(number, delta)
            if choice.finish_reason is not None:
                self._open -= 1
                self._metrics.finished(choice.finish_reason)
                if finish == RUNNING:  # a stop string, of which the router does not know
                    self._router.cancel(self.request_id, index, "stop")
                return

    def on_closed(self, stages: StageTimes) -> None:
        """The router has closed its record. If a choice has not ended by now, the prompt has failed: the
        rest will never come."""
        self.stages = stages
        self.closed.set()
        self.fail(ApiError(503, GIVEN_UP))

    def fail(self, error: ApiError) -> None:
        """Does nothing after the prompt's end."""
        self.closed.set()
        if self._open:
            self._open = 0
            self._router.forget(self.request_id)
            self._on_failure(error)

    def cancel(self, cause: CancelCause) -> None:
        """Tell the router, once, if it is still at work."""
        if self._open:
            self._open = 0
            self._router.cancel(self.request_id, ALL_CHOICES, cause)
            self._router.forget(self.request_id)
        self.closed.set()

    def throttle(self, paused: bool) -> None:
        for index, choice in enumerate(self.choices):
            if choice.finish_reason is None and self._open:
                self._router.throttle(self.request_id, index, paused)
