"""Which processes are hung rather than dead: judged by heartbeats and by progress.

A heartbeat is a snapshot, sent by a thread of its own every `--heartbeat-seconds`. None at all means
that the process is stopped or starved: within a second it does not count as ready, after
`--hang-seconds` it is hung. A process that sends heartbeats while its main loop makes no turn is hung
after `--stall-seconds`; that is longer, for one step of a large model may take long. A process that
starts gets more time as well: importing and loading can keep its heartbeat from running. But one that is
not ready `--start-timeout` seconds after its start is hung, whatever it says.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from daemon.supervision.supervisor import Child

SILENT_HEARTBEATS: Final = 1.8
"""Heartbeats missed until a process is silent: with the default of 0.5 s, below a second."""
LEAST_SILENCE_SECONDS: Final = 0.5
"""A process that is merely starved of processor time comes late by this much: with heartbeats shorter
than the default, one or two that are late are no sign of anything."""
LOADING_SECONDS: Final = 30.0
"""Silence after which a process that has not served yet is hung, unless `--hang-seconds` is longer."""
UNHEARD_SECONDS: Final = 60.0
"""Silence after which a process that has not said hello is hung: it may be reading libraries from a slow
disk."""
ASLEEP_SECONDS: Final = 1.0
"""The daemon looks every half second at least; a longer gap means that it was stopped itself, as on a
machine that stood still, and that it cannot know what the others did meanwhile."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Hung:
    """A process to be replaced."""

    child: Child
    reason: str


class HangWatch:
    """Looks at the children once per turn of the daemon's loop. No clock in here."""

    def __init__(
        self,
        heartbeat_seconds: float,
        hang_seconds: float,
        stall_seconds: float,
        start_seconds: float,
    ) -> None:
        self._silent_seconds = max(SILENT_HEARTBEATS * heartbeat_seconds, LEAST_SILENCE_SECONDS)
        self._hang_seconds = max(hang_seconds, 2 * self._silent_seconds)
        self._stall_seconds = stall_seconds
        self._start_seconds = start_seconds
        self._looked_at: float | None = None

    def look(self, children: Iterable[Child], now: float) -> list[Hung]:
        """Update `Child.silent` of all that have served; returns those to be killed."""
        children = [child for child in children if child.alive]
        gap = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        if gap > ASLEEP_SECONDS:
            log.warning("the daemon itself stood still for %.1f s", gap)
            for child in children:
                child.started_at = min(child.started_at + gap, now)
                child.snapshot_at = min(child.snapshot_at + gap, now)
                child.progress_at = min(child.progress_at + gap, now)
        return [hung for child in children if (hung := self._judge(child, now)) is not None]

    def next_silence(self, children: Iterable[Child]) -> float | None:
        times = [child.snapshot_at + self._silent_seconds for child in children if child.ready]
        return min(times, default=None)

    def _judge(self, child: Child, now: float) -> Hung | None:
        silence = now - child.snapshot_at
        child.silent = child.has_served and silence >= self._silent_seconds
        if silence > self._longest_silence(child):
            return Hung(child, f"no heartbeat for {silence:.1f} s")
        if not child.has_served and now - child.started_at > self._start_seconds:
            doing = f": {child.detail}" if child.detail else ""
            return Hung(
                child, f"not ready after {self._start_seconds:g} s{doing}; see --start-timeout"
            )
        stall = now - child.progress_at
        if child.state == "ready" and stall > self._stall_seconds:
            return Hung(child, f"its main loop has not made a turn for {stall:.0f} s")
        return None

    def _longest_silence(self, child: Child) -> float:
        if child.has_served:
            return self._hang_seconds
        if child.state is None:
            return max(self._hang_seconds, UNHEARD_SECONDS)
        return max(self._hang_seconds, LOADING_SECONDS)
