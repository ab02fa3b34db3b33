"""All that one HTTP request runs: its prompts, their choices, and the end of them."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import Protocol

from frontend.errors import ApiError
from frontend.generation.choice import Choice
from frontend.generation.deltas import DeltaConsumer, FinishReason
from frontend.generation.generation import Generation, RouterCommands
from frontend.generation.output_parser import PlainText
from frontend.generation.request import GenerationRequest
from frontend.generation.text_decoding import TokenTexts
from frontend.generation.usage import Usage
from frontend.metrics import FrontendMetrics
from transport.ids import RequestId
from transport.messages.generate import CancelCause, StageTimes
from transport.messages.to_router import Submit

CLOSE_SECONDS = 0.25
"""How long to wait for the router's stage times once the client has everything."""


class JobRouter(RouterCommands, Protocol):
    """The part of the router's client that jobs need."""

    def submit(self, generation: Generation, message: Submit) -> None:
        """Raises ApiError (503) if the router does not take the prompt."""
        ...


class Job:
    """One generating HTTP request. Every job is started once, and cancelled at its end so that nothing
    goes on without a client; cancelling what has finished does nothing."""

    def __init__(
        self,
        request: GenerationRequest,
        router: JobRouter,
        texts: TokenTexts,
        metrics: FrontendMetrics,
        call_id: str,
        received_at: float,
        affinity: str = "",
    ) -> None:
        """`affinity` names the client's conversation; if it is empty, the prompt's beginning does."""
        self.request = request
        self.call_id = call_id
        self.cancelled: CancelCause | None = None
        self.generations: list[Generation] = []
        self._router = router
        self._texts = texts
        self._metrics = metrics
        self.received_at = received_at
        self._affinity = affinity
        self._consumer: DeltaConsumer | None = None

    @property
    def choice_count(self) -> int:
        return len(self.request.prompts) * self.request.n

    @property
    def finished(self) -> bool:
        return all(generation.finished for generation in self.generations)

    @property
    def finish_reasons(self) -> list[FinishReason]:
        """One for each choice that has ended."""
        reasons = [choice.finish_reason for g in self.generations for choice in g.choices]
        return [reason for reason in reasons if reason is not None]

    @property
    def first_token_at(self) -> float:
        """In CLOCK_MONOTONIC seconds; 0.0 if no token has come."""
        times = [g.first_token_at for g in self.generations if g.first_token_at]
        return min(times, default=0.0)

    def start(self, consumer: DeltaConsumer) -> None:
        """Raises ApiError (503) if the router does not take the prompts."""
        self._consumer = consumer
        request = self.request
        for position, prompt in enumerate(request.prompts):
            suffix = f"-{position}" if len(request.prompts) > 1 else ""
            generation = Generation(
                RequestId(f"{self.call_id}{suffix}"),
                prompt,
                position * request.n,
                [self._new_choice() for _ in range(request.n)],
                self._router,
                consumer.write,
                partial(self._prompt_failed, consumer),
                self._metrics,
                self.received_at,
            )
            self.generations.append(generation)
        for generation in self.generations:
            self._router.submit(generation, self._submit(generation))

    def _new_choice(self) -> Choice:
        return Choice(self._texts.decoder(), self.request.stops, PlainText())

    def _submit(self, generation: Generation) -> Submit:
        request, prompt = self.request, generation.prompt
        return Submit(
            request_id=generation.request_id,
            kind=prompt.kind,
            generate=request.generate,
            received_at=self.received_at,
            n=request.n,
            affinity=self._affinity or prompt.affinity,
            add_special_tokens=prompt.add_special_tokens,
            call=RequestId(self.call_id if len(request.prompts) > 1 else ""),
            call_choices=self.choice_count,
        )

    def usage(self) -> Usage:
        return Usage(
            prompt=sum(generation.prompt_tokens for generation in self.generations),
            cached=sum(generation.cached_tokens for generation in self.generations),
            completion=sum(
                choice.completion_tokens
                for generation in self.generations
                for choice in generation.choices
            ),
        )

    def throttle(self, paused: bool) -> None:
        for generation in self.generations:
            generation.throttle(paused)

    def cancel(self, cause: CancelCause) -> None:
        """Idempotent; the first cause counts."""
        if self.generations and not self.finished:
            self.cancelled = self.cancelled or cause
            self._metrics.aborted()
        for generation in self.generations:
            generation.cancel(cause)

    def fail(self, error: ApiError) -> None:
        if self._consumer is not None and not self.finished:
            self.cancel("shutdown")
            self._consumer.fail(error)

    def give_up(self) -> None:
        for generation in self.generations:
            generation.cancel("failed")

    def _prompt_failed(self, consumer: DeltaConsumer, error: ApiError) -> None:
        self.give_up()
        consumer.fail(error)

    def close(self) -> None:
        for generation in self.generations:
            self._router.forget(generation.request_id)

    async def wait_closed(self) -> StageTimes:
        """The stage times of the first prompt; waits up to CLOSE_SECONDS for the router to report them."""
        if not self.generations:
            return StageTimes()
        first = self.generations[0]
        if self.cancelled is None and not first.closed.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(first.closed.wait(), CLOSE_SECONDS)
        return first.stages
