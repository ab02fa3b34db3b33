"""The end of an instance: running requests end, then the frontends, then all, each in its time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from daemon.errors import DeepInferError
from daemon.instance.phase import Event, Lifecycle, Phase
from daemon.supervision.supervisor import Supervisor
from transport.ids import ProcessName
from transport.messages.base import Message
from transport.messages.from_daemon import Drain
from transport.messages.telemetry import Snapshot

TERMINATE_SECONDS: Final = 5.0
"""From SIGTERM to SIGKILL."""
KILL_SECONDS: Final = 20.0
"""From SIGKILL until we say that a process does not end (a GPU takes seconds to let go)."""
IDLE_SNAPSHOTS: Final = 2
"""Of the router, without a request: one may have been on its way when the drain began."""

log = logging.getLogger(__name__)


class Shutdown:
    """Takes the instance through its stopping phases. No clock in here."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        supervisor: Supervisor,
        send: Callable[[ProcessName, Message], bool],
    ) -> None:
        self._lifecycle = lifecycle
        self._supervisor = supervisor
        self._send = send
        self._drain_deadline = 0.0
        self._idle_snapshots = 0

    def begin(self, drain_seconds: float, now: float) -> bool:
        """False if the instance is stopping already. One that never served has nothing to drain."""
        if not self._lifecycle.phase.has_served:
            drain_seconds = 0.0
        if not self._lifecycle.take(Event.STOP, now):
            return False
        self._drain_deadline = now + drain_seconds
        for child in self._supervisor.children.values():
            if child.alive and child.spec.role in ("frontend", "router"):
                self._send(child.name, Drain())
        return True

    def hurry(self, now: float) -> None:
        self._drain_deadline = min(self._drain_deadline, now)

    def router_told(self, snapshot: Snapshot) -> None:
        if self._lifecycle.phase is Phase.DRAINING and not snapshot.requests:
            self._idle_snapshots += 1

    def go_on(self, now: float) -> None:
        """Take what steps are due.

        Raises:
            DeepInferError: a process does not end even after SIGKILL.
        """
        phase = self._lifecycle.phase
        if phase is Phase.DRAINING and self._is_drained(now):
            self._lifecycle.take(Event.DRAINED, now)
            self._supervisor.terminate("frontend")
        waited = now - self._lifecycle.since
        if self._lifecycle.phase is Phase.CLOSING:
            frontends = any(child.alive for child in self._supervisor.by_role("frontend"))
            if not frontends or waited > TERMINATE_SECONDS:
                self._lifecycle.take(Event.FRONTENDS_GONE, now)
                self._supervisor.terminate()
        elif phase is Phase.TERMINATING and waited > TERMINATE_SECONDS:
            self.kill(now)
        elif phase is Phase.KILLING and waited > KILL_SECONDS:
            raise DeepInferError(f"These processes do not end: {self._left()}.")

    def kill(self, now: float) -> None:
        """Send SIGKILL to what is left. Does nothing before `begin` or a second time."""
        if self._lifecycle.take(Event.KILL, now):
            log.warning("killing what has not ended: %s", self._left())
            self._supervisor.kill()

    def _is_drained(self, now: float) -> bool:
        routers = any(child.ready for child in self._supervisor.by_role("router"))
        return self._idle_snapshots >= IDLE_SNAPSHOTS or not routers or now >= self._drain_deadline

    def _left(self) -> str:
        return ", ".join(c.name for c in self._supervisor.children.values() if c.alive)
