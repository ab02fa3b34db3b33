"""Whether requests may come in, as the daemon and the router tell."""

from __future__ import annotations

import msgspec

from frontend.errors import ApiError
from frontend.generation.request import ModelLimits
from frontend.links.router_client import RouterClient
from frontend.metrics import FrontendMetrics
from frontend.settings import FrontendSettings
from transport.messages.from_daemon import InstanceState

ADMITTING: frozenset[InstanceState] = frozenset({"ready", "degraded"})
"""A degraded instance has lost a process that is being started again: what is left of it serves on,
and what nobody can serve yet waits at the router, within its bounds."""


class Readiness(msgspec.Struct, frozen=True):
    """The answer of `/ready`."""

    ready: bool
    state: InstanceState
    reason: str


class Gate:
    """Admission of generating requests. Used on the loop's thread."""

    def __init__(
        self, settings: FrontendSettings, router: RouterClient, metrics: FrontendMetrics
    ) -> None:
        self._settings = settings
        self._router = router
        self._metrics = metrics
        self._state: InstanceState = "starting"
        self._reason = "the instance is starting"
        self._is_draining = False

    def set_state(self, state: InstanceState, reason: str) -> None:
        self._state, self._reason = state, reason

    def drain(self) -> None:
        self._is_draining = True

    def readiness(self) -> Readiness:
        """Whether requests are served now, and if not, why."""
        if self._is_draining or self._state == "draining":
            return Readiness(False, "draining", "the server is shutting down")
        if self._state != "ready":
            return Readiness(False, self._state, self._reason or f"the instance is {self._state}")
        if self._router.model is None:
            return Readiness(False, "starting", "the router has no model yet")
        return Readiness(True, self._state, "")

    @property
    def is_waiting_for_router(self) -> bool:
        """Whether requests would be let in if only the router had told what it serves."""
        is_let_in = self._state in ADMITTING and not self._is_draining
        return is_let_in and self._router.model is None

    def admit(self) -> ModelLimits:
        """Let a request in; returns what it is checked against.

        Raises:
            ApiError: 503 with Retry-After.
        """
        readiness = self.readiness()
        model = self._router.model
        if readiness.state not in ADMITTING or model is None:
            self._metrics.rejected("draining" if readiness.state == "draining" else "not_ready")
            raise ApiError(
                503,
                f"The server takes no requests now: {readiness.reason}.",
                code="not_ready",
                retry_after=self._settings.retry_after_seconds,
            )
        settings = self._settings
        return ModelLimits(
            settings.model_name,
            model.vocab_size,
            model.max_model_len,
            settings.max_choices,
            settings.sampling_defaults,
        )
