"""Whether requests may come in: what a frontend has been told, and what follows from it."""

from __future__ import annotations

from enum import Enum, auto
from typing import assert_never

import msgspec

from transport.messages.from_daemon import Drain, InstanceState, InstanceStatus
from transport.messages.generate import ModelInfo
from transport.messages.to_frontend import Serving

ADMITTING: frozenset[InstanceState] = frozenset({"ready", "degraded"})
"""A degraded instance has lost a process that is being started again: what is left of it serves on,
and what nobody can serve yet waits at the router, within its bounds."""


class RouterLost(msgspec.Struct, frozen=True):
    """The router is gone. Its successor says for itself what it serves."""


News = InstanceStatus | Drain | Serving | RouterLost


class Phase(Enum):
    UNTOLD = auto()
    """The daemon has not said how things are."""
    CLOSED = auto()
    """The instance takes no requests."""
    WAITING = auto()
    """Requests may come in as soon as the router has said what it serves."""
    OPEN = auto()
    DRAINING = auto()


class ReadyAnswer(msgspec.Struct, frozen=True):
    """The body of `/ready`."""

    ready: bool
    state: InstanceState
    reason: str


class Readiness(msgspec.Struct, frozen=True):
    """What is known at one moment."""

    status: InstanceStatus | None = None
    model: ModelInfo | None = None
    is_draining: bool = False
    has_lost_router: bool = False
    """Whether a router was lost and none has yet taken its place."""

    held_serial: int = 0
    """The serial of the last status that requests were answered by; 0 is none."""

    def next_state(self, news: News) -> Readiness:
        change = msgspec.structs.replace
        match news:
            case InstanceStatus():
                changed = change(self, status=news)
            case Drain():
                changed = change(self, is_draining=True)
            case Serving(model):
                changed = change(self, model=model, has_lost_router=False)
            case RouterLost():
                changed = change(self, model=None, has_lost_router=True)
            case _:
                assert_never(news)
        if changed.status is None or changed.phase is Phase.WAITING:
            return changed
        return change(changed, held_serial=changed.status.serial)

    @property
    def phase(self) -> Phase:
        if self.is_draining:
            return Phase.DRAINING
        if self.status is None:
            return Phase.UNTOLD
        if self.status.state == "draining":
            return Phase.DRAINING
        if self.status.state not in ADMITTING:
            return Phase.CLOSED
        return Phase.WAITING if self.model is None else Phase.OPEN

    def answer(self) -> ReadyAnswer:
        """Ready is only an instance that lacks nothing."""
        phase = self.phase
        if phase is Phase.DRAINING:
            return ReadyAnswer(False, "draining", "the server is shutting down")
        status = self.status or InstanceStatus("starting")
        if status.state != "ready":
            reason = status.reason or f"the instance is {status.state}"
            return ReadyAnswer(False, status.state, reason)
        if phase is Phase.WAITING:
            return ReadyAnswer(False, "starting", "the router has no model yet")
        return ReadyAnswer(True, "ready", "")
