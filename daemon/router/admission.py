"""Which requests are let in. What counts is HTTP requests: one may carry many prompts."""

from __future__ import annotations

from dataclasses import dataclass

from daemon.router.generation import Generation
from daemon.router.settings import RouterSettings
from transport.ids import RequestId
from transport.messages.generate import RequestFailed


@dataclass
class _Call:
    """An HTTP request that was let in."""

    prompts: int = 0
    waiting: int = 0


class Admission:
    """Counts the HTTP requests that wait: those of which no worker has begun some prompt."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._calls: dict[RequestId, _Call] = {}
        self._is_draining = False
        self.num_waiting = 0

    def drain(self) -> None:
        self._is_draining = True

    def count(self, generation: Generation, prompts: int = 0, waiting: int = 0) -> None:
        """A prompt came (`prompts` = 1) or went (-1), began (`waiting` = -1) or has to wait (1)."""
        call = self._calls.setdefault(generation.call, _Call())
        was_waiting = call.waiting > 0
        call.prompts += prompts
        call.waiting += waiting
        self.num_waiting += (call.waiting > 0) - was_waiting
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
        if self.num_waiting >= self._settings.max_waiting:
            message = (
                f"The server is overloaded: {self.num_waiting} requests are waiting already. "
                f"Try again in {seconds} s."
            )
            return RequestFailed(request_id, 429, "overloaded", message, retry_after=seconds)
        return None
