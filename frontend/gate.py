"""Lets requests in, or refuses them."""

from __future__ import annotations

import asyncio
import contextlib

from frontend.errors import ApiError
from frontend.generation.request import ModelLimits
from frontend.metrics import FrontendMetrics
from frontend.readiness import News, Phase, Readiness
from frontend.settings import FrontendSettings
from transport.messages.from_daemon import ApiKeys

INFORMED_SECONDS = 5.0
"""How long a new frontend leaves connections in the listener's queue until it knows what the router
serves, where requests may come in. As long as a router may be silent without being replaced."""


class Gate:
    """Used on the loop's thread."""

    def __init__(
        self,
        settings: FrontendSettings,
        metrics: FrontendMetrics,
        max_token_bytes: int | None = None,
    ) -> None:
        """`max_token_bytes` as in `ModelLimits`."""
        self.readiness = Readiness()
        self._settings = settings
        self._metrics = metrics
        self._max_token_bytes = max_token_bytes
        self._changed = asyncio.Event()

    def take(self, news: News) -> None:
        self.readiness = self.readiness.next_state(news)
        self._changed.set()

    def admit(self) -> ModelLimits:
        """What a request is checked against.

        Raises:
            ApiError: 503 with Retry-After.
        """
        settings, model = self._settings, self.readiness.model
        if self.readiness.phase is not Phase.OPEN or model is None:
            answer = self.readiness.answer()
            self._metrics.rejected("draining" if answer.state == "draining" else "not_ready")
            raise self._refusal()
        return ModelLimits(
            settings.model_name,
            model.vocab_size,
            model.max_model_len,
            settings.max_choices,
            settings.sampling_defaults,
            self._max_token_bytes,
            settings.allow_priority,
        )

    def keys(self) -> ApiKeys:
        """The keys that open the API.

        Raises:
            ApiError: 503; the daemon has not told them yet.
        """
        status = self.readiness.status
        if status is None:
            raise self._refusal()
        return status.keys

    def _refusal(self) -> ApiError:
        return ApiError(
            503,
            f"The server takes no requests now: {self.readiness.answer().reason}.",
            code="not_ready",
            retry_after=self._settings.retry_after_seconds,
        )

    async def wait_to_accept(self) -> None:
        """Wait until it is time to accept connections: one of several frontends that starts late must
        not answer 503 where the others serve. A daemon that does not say how things are ends this
        process."""
        await self._wait_for_end_of(Phase.UNTOLD)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wait_for_end_of(Phase.WAITING), INFORMED_SECONDS)

    async def _wait_for_end_of(self, phase: Phase) -> None:
        while self.readiness.phase is phase:
            self._changed.clear()
            await self._changed.wait()
