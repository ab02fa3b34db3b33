"""Which requests are let in: HTTP requests, their choices and the bytes of their prompts are bounded.

What is small, one choice for a short prompt, is bounded by the number of HTTP requests alone, so that
those who ask for much cannot keep those out who ask for little.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from daemon.router.generation import Generation
from daemon.router.settings import RouterSettings
from transport.ids import RequestId
from transport.messages.generate import RequestFailed
from transport.prompt_turns import LONG_PROMPT_BYTES


@dataclass
class _Call:
    """An HTTP request that was let in."""

    prompts: int = 0
    waiting: int = 0


class Admission:
    """Counts what waits: of HTTP requests those of which no worker has begun some prompt."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._calls: dict[RequestId, _Call] = {}
        self._is_draining = False
        self.num_waiting = 0
        self.waiting_choices = 0
        self.waiting_bytes = 0

    def drain(self) -> None:
        self._is_draining = True

    def count(self, generation: Generation, prompts: int = 0, waiting: int = 0) -> None:
        """A prompt came (`prompts` = 1) or went (-1), began (`waiting` = -1) or has to wait (1)."""
        call = self._calls.setdefault(generation.call, _Call())
        was_waiting = call.waiting > 0
        call.prompts += prompts
        call.waiting += waiting
        self.num_waiting += (call.waiting > 0) - was_waiting
        self.waiting_choices += waiting * len(generation.choices)
        self.waiting_bytes += waiting * generation.prompt_bytes
        if not call.prompts:
            del self._calls[generation.call]

    def refusal(self, generation: Generation, is_served: bool) -> RequestFailed | None:
        """Why this prompt is not let in, or None. The further prompts of an HTTP request that was
        let in always are. `is_served`: there is a worker, or one comes."""
        request_id, seconds = generation.request_id, self._settings.retry_after_seconds
        if generation.call in self._calls:
            return None
        if self._is_draining:
            message = "The server is shutting down and takes no new requests."
            return RequestFailed(request_id, 503, "shutting_down", message, retry_after=seconds)
        if not is_served:
            message = "No worker serves the model now: try again later."
            return RequestFailed(request_id, 503, "not_ready", message, retry_after=seconds)
        if (what := self._overload(generation)) is not None:
            message = f"The server is overloaded: {what}. Try again in {seconds} s."
            return RequestFailed(request_id, 429, "overloaded", message, retry_after=seconds)
        return None

    def _overload(self, generation: Generation) -> str | None:
        if self.num_waiting >= self._settings.max_waiting:
            return f"{self.num_waiting} requests are waiting already"
        choices, size = generation.call_choices, generation.prompt_bytes
        waiting, limit = self.waiting_choices, self._settings.max_waiting_choices
        # One that is over a limit by itself is let in when nothing waits.
        if choices > 1 and waiting and waiting + choices > limit:
            return (
                f"{waiting} choices are waiting already, and with the {choices} of this request "
                f"there would be more than {limit}"
            )
        waiting, limit = self.waiting_bytes, self._settings.max_waiting_bytes
        if (size > LONG_PROMPT_BYTES or choices > 1) and waiting and waiting + size > limit:
            return (
                f"{waiting} bytes of prompts are waiting already, and with the {size} of this one "
                f"there would be more than {limit}"
            )
        return None

    def check_integrity(self, generations: Iterable[Generation]) -> None:
        """Raises AssertionError: the counters do not agree with the requests."""
        waiting = [generation for generation in generations if generation.is_waiting]
        counted = (self.num_waiting, self.waiting_choices, self.waiting_bytes)
        wanted = (
            len({generation.call for generation in waiting}),
            sum(len(generation.choices) for generation in waiting),
            sum(generation.prompt_bytes for generation in waiting),
        )
        if counted != wanted:
            raise AssertionError(f"{counted} requests, choices, bytes wait, should be {wanted}")
