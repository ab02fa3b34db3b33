"""Where an instance is between its first process and its last, and what takes it further.

    STARTING <-> CONFIRMING -> SERVING -> DEGRADED <-> RECOVERING -> SERVING
        any of these -> DRAINING -> CLOSING -> TERMINATING -> KILLING

No clock, no process and no socket in here.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from transport.messages.from_daemon import InstanceState


class Phase(enum.Enum):
    STARTING = enum.auto()
    """Some process has not been ready yet."""
    CONFIRMING = enum.auto()
    """All are ready for the first time; the frontends have been told, and have to act on it."""
    SERVING = enum.auto()
    DEGRADED = enum.auto()
    """Some process is missing since the instance served."""
    RECOVERING = enum.auto()
    """All are ready again; the frontends have to act on it."""
    DRAINING = enum.auto()
    """No new requests; running ones get time to end."""
    CLOSING = enum.auto()
    """The frontends have been sent SIGTERM."""
    TERMINATING = enum.auto()
    """All have been."""
    KILLING = enum.auto()
    """What was left has been sent SIGKILL."""

    @property
    def is_stopping(self) -> bool:
        return self in _STOPPING

    @property
    def has_served(self) -> bool:
        """True throughout a stop, where nothing asks."""
        return self not in (Phase.STARTING, Phase.CONFIRMING)

    @property
    def for_frontends(self) -> InstanceState:
        """Frontends are told `ready` first and confirm it, then everybody else is."""
        if self in (Phase.CONFIRMING, Phase.RECOVERING):
            return "ready"
        return self.for_others

    @property
    def for_others(self) -> InstanceState:
        return "draining" if self.is_stopping else _STATES[self]


class Event(enum.Enum):
    ALL_READY = enum.auto()
    """Every process is ready."""
    ONE_MISSING = enum.auto()
    """At least one process is not."""
    CONFIRMED = enum.auto()
    """All frontends act on `ready`, or have had their time."""
    STOP = enum.auto()
    DRAINED = enum.auto()
    """No request is left, or their time is up."""
    FRONTENDS_GONE = enum.auto()
    """They have ended, or their time is up."""
    KILL = enum.auto()
    """Time is up for SIGTERM, or somebody has lost patience."""


_STATES: Final[dict[Phase, InstanceState]] = {
    Phase.STARTING: "starting",
    Phase.CONFIRMING: "starting",
    Phase.SERVING: "ready",
    Phase.DEGRADED: "degraded",
    Phase.RECOVERING: "degraded",
}
_STOPPING: Final = (Phase.DRAINING, Phase.CLOSING, Phase.TERMINATING, Phase.KILLING)

_NEXT: Final[dict[tuple[Phase, Event], Phase]] = {
    (Phase.STARTING, Event.ALL_READY): Phase.CONFIRMING,
    (Phase.CONFIRMING, Event.ONE_MISSING): Phase.STARTING,
    (Phase.CONFIRMING, Event.CONFIRMED): Phase.SERVING,
    (Phase.SERVING, Event.ONE_MISSING): Phase.DEGRADED,
    (Phase.DEGRADED, Event.ALL_READY): Phase.RECOVERING,
    (Phase.RECOVERING, Event.ONE_MISSING): Phase.DEGRADED,
    (Phase.RECOVERING, Event.CONFIRMED): Phase.SERVING,
    (Phase.DRAINING, Event.DRAINED): Phase.CLOSING,
    (Phase.CLOSING, Event.FRONTENDS_GONE): Phase.TERMINATING,
    **{(phase, Event.STOP): Phase.DRAINING for phase in Phase if phase not in _STOPPING},
    **{(phase, Event.KILL): Phase.KILLING for phase in _STOPPING},
}


def next_phase(phase: Phase, event: Event) -> Phase:
    """An event without a meaning in `phase` leaves it as it is."""
    return _NEXT.get((phase, event), phase)


@dataclass
class Lifecycle:
    """The phase of an instance, and since when it is in it."""

    since: float
    phase: Phase = Phase.STARTING

    def take(self, event: Event, now: float) -> bool:
        phase = next_phase(self.phase, event)
        if phase is self.phase:
            return False
        self.phase, self.since = phase, now
        return True
