"""What the processes of an instance say of themselves, and what the daemon answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from daemon.instance.frontend_status import FrontendStatus
from daemon.supervision.supervisor import Supervisor
from transport.ids import ProcessName
from transport.messages.base import Hello, Message
from transport.messages.from_daemon import PeerLost
from transport.messages.telemetry import Snapshot
from transport.messages.to_daemon import StateChanged

log = logging.getLogger(__name__)


class ProcessReports:
    """Notes on each `Child` what its process says."""

    def __init__(
        self,
        supervisor: Supervisor,
        frontends: FrontendStatus,
        send: Callable[[ProcessName, Message], bool],
        router_told: Callable[[Snapshot], None],
    ) -> None:
        """`router_told` is called with each snapshot of the router."""
        self._supervisor = supervisor
        self._frontends = frontends
        self._send = send
        self._router_told = router_told

    def knows(self, hello: Hello) -> str | None:
        child = self._supervisor.children.get(hello.name)
        if child is None or child.process is None or child.process.pid != hello.pid:
            return f"process {hello.pid} is not {hello.name} of this instance"
        return None

    def welcomed(self, name: ProcessName) -> None:
        """A frontend is told the status in the same turn, a router at once which processes not to
        wait for."""
        child = self._supervisor.children[name]
        child.state = "starting"
        if child.spec.role == "frontend":
            self._frontends.joined(name)
        elif child.spec.role == "router":
            for other in self._supervisor.children.values():
                if other.is_given_up:
                    self._send(name, PeerLost(other.name, comes_back=False))

    def state_changed(self, name: ProcessName, message: StateChanged) -> None:
        child = self._supervisor.children.get(name)
        if child is None:
            return
        child.state, child.detail = message.state, message.detail
        now = time.monotonic()
        if message.state == "ready" and child.served_from is None:
            child.served_from = now
        # What came before was start-up: from here on it is expected to make progress.
        child.snapshot_at = child.progress_at = now
        log.info("%s is %s%s", name, message.state, message.detail and f": {message.detail}")

    def status_held(self, name: ProcessName, serial: int) -> None:
        self._frontends.held(name, serial)

    def fatal_error(self, name: ProcessName, reason: str) -> None:
        child = self._supervisor.children.get(name)
        if child is not None:
            child.fatal = reason

    def snapshot(self, snapshot: Snapshot) -> None:
        child = self._supervisor.children.get(snapshot.name)
        if child is None or child.process is None or child.process.pid != snapshot.pid:
            return
        now = time.monotonic()
        if child.snapshot is None or snapshot.progress != child.snapshot.progress:
            child.progress_at = now
        child.snapshot = child.last_snapshot = snapshot
        child.snapshot_at = now
        if child.spec.role == "router":
            self._router_told(snapshot)

    def living(self) -> dict[ProcessName, int]:
        children = self._supervisor.children.values()
        return {c.name: c.process.pid for c in children if c.process is not None}
