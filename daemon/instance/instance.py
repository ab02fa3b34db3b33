"""The daemon's main loop: one instance from its first process to its last file.

`starting -> ready <-> degraded -> draining -> (terminated, killed) -> gone`. One thread, one poller
over the control and telemetry sockets, the children's pidfds and the signals; nothing here waits for
anything else.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import zmq

from daemon.errors import ConfigurationError, DeepInferError
from daemon.inspection.control_server import ControlServer
from daemon.inspection.state_report import answer
from daemon.instance.frontend_status import FrontendStatus
from daemon.instance.role_settings import InstancePlan
from daemon.metrics.exposition import MetricsExporter
from daemon.supervision.hang_watch import HangWatch
from daemon.supervision.instance_view import InstanceView
from daemon.supervision.supervisor import Child, Death, Supervisor
from daemon.system.listen import base_url
from daemon.system.sd_notify import ServiceManager, watchdog_seconds
from daemon.system.stop_signals import StopSignals
from transport.ids import ProcessName
from transport.messages.base import Hello
from transport.messages.from_daemon import Drain, InstanceState, InstanceStatus, PeerLost
from transport.messages.telemetry import Snapshot
from transport.messages.to_daemon import StateChanged

TURN_SECONDS: Final = 0.5
"""Longest sleep of the main loop: timers are at most this late."""
TERMINATE_SECONDS: Final = 5.0
"""From SIGTERM to SIGKILL."""
KILL_SECONDS: Final = 20.0
"""From SIGKILL until we say that a process does not end (a GPU takes seconds to let go)."""
EXTEND_SECONDS: Final = 60.0
"""How much longer systemd is asked to wait, each turn, while the instance loads."""

log = logging.getLogger(__name__)


@dataclass
class _Stop:
    """A stop under way."""

    drain_deadline: float
    began: float
    idle_snapshots: int = 0
    """Of the router, since the drain began, without a request."""
    drained: float | None = None
    """When the frontends were told to end."""
    terminated: float | None = None
    """When all others were."""
    killed: float | None = None


class Instance:
    """Runs one instance. Owns the supervisor and, given to it, the control server."""

    def __init__(
        self,
        plan: InstancePlan,
        supervisor: Supervisor,
        server: ControlServer,
        port: int,
        on_ready: Callable[[str], None],
    ) -> None:
        """`on_ready` is called once, with the instance's URL, when it first serves."""
        self._plan = plan
        self._supervisor = supervisor
        self._server = server
        self._url = base_url(plan.config.host, port)
        self._on_ready = on_ready
        self._service = ServiceManager()
        self._watchdog = watchdog_seconds()
        self._exporter = MetricsExporter()
        config = plan.config
        self._hang_watch = HangWatch(
            config.heartbeat_seconds,
            config.hang_seconds,
            config.stall_seconds,
            config.start_timeout,
        )
        self._started_at = time.monotonic()
        self._was_ready = False
        """Whether it has ever served."""
        self._is_announced = False
        """Whether it serves now, and the frontends act on that."""
        self._frontend_status = FrontendStatus(
            server.send,
            InstanceStatus("starting", "the processes are being started", serial=1),
            self._started_at,
        )
        self._stop: _Stop | None = None
        self._failure: DeepInferError | None = None

    def run(self, signals: StopSignals) -> None:
        """Start everything, serve, and return when all processes are gone.

        Raises:
            ConfigurationError: it could not start, and the same again would not.
            DeepInferError: it could not start, or a process does not end.
        """
        try:
            self._supervisor.start_all()
            while self._stop is None or self._supervisor.num_alive:
                self._wait(signals)
                self._turn(signals)
        finally:
            # Nothing is left to end after a regular stop.
            self._supervisor.kill()
            self._supervisor.wait_until_gone(KILL_SECONDS)
            self._service.close()
        if self._failure is not None:
            raise self._failure

    # ---- the loop -----------------------------------------------------------------------------

    def _wait(self, signals: StopSignals) -> None:
        poller = zmq.Poller()
        self._server.register(poller)
        poller.register(signals.fd, zmq.POLLIN)
        for pidfd in self._supervisor.pidfds():
            poller.register(pidfd, zmq.POLLIN)
        now = time.monotonic()
        deadlines = (
            now + TURN_SECONDS,
            self._supervisor.next_restart(),
            self._hang_watch.next_silence(self._supervisor.children.values()),
        )
        wake = min(at for at in deadlines if at is not None)
        # Rounded up: a turn that comes too early would only wait again.
        poller.poll(math.ceil(max(wake - now, 0.0) * 1000))

    def _turn(self, signals: StopSignals) -> None:
        now = time.monotonic()
        if signals.take():
            self._begin_stop(now, self._plan.config.drain_timeout, hurry=signals.count > 1)
            if signals.count > 2:
                self._kill(now)
        self._server.handle_incoming(self)
        for death in self._supervisor.collect_deaths(now, not self._was_ready):
            self._on_death(death)
        self._supervisor.restart_due(now)
        if self._stop is None:
            for hung in self._hang_watch.look(self._supervisor.children.values(), now):
                self._supervisor.kill_hung(hung.child, hung.reason)
        if self._stop is not None:
            self._go_on_stopping(self._stop, now)
        elif not self._was_ready and now - self._started_at > self._plan.config.start_timeout:
            seconds = self._plan.config.start_timeout
            reason = f"The instance was not ready after {seconds:g} s ({self._known_state()[1]})"
            self._fail_start(DeepInferError(f"{reason}: raise --start-timeout or read the log."))
        self._tell_state(now)
        if self._stop is None and not self._was_ready:
            self._service.extend_timeout(EXTEND_SECONDS)
        self._service.deliver()
        if self._watchdog is not None and self._makes_progress(now, self._watchdog):
            self._service.watchdog()

    def _makes_progress(self, now: float, seconds: float) -> bool:
        """Whether no worker that serves has stood still for half of `seconds`."""
        workers = self._supervisor.by_role("worker")
        serving = (c for c in workers if c.alive and c.state == "ready")
        return all(now - c.progress_at < seconds / 2 for c in serving)

    def _on_death(self, death: Death) -> None:
        child = death.child
        if child.last_snapshot is not None:
            self._exporter.process_ended(child.last_snapshot)
            child.last_snapshot = None
        for peer in self._concerned_by(child):
            self._server.send(peer.name, PeerLost(child.name, not death.hopeless, death.pid))
        if death.hopeless and not self._was_ready:
            # What a restart does not cure lies in the model, the options or the machine.
            kind = ConfigurationError if child.fatal else DeepInferError
            self._fail_start(kind(f"{child.name} cannot start: {death.reason}"))

    def _concerned_by(self, lost: Child) -> list[Child]:
        """Who must know of a loss: the router, or of its own those that have to join the new one.
        (Frontends watch their connection to the router themselves.)"""
        roles = ("worker", "tokenizer") if lost.spec.role == "router" else ("router",)
        return [c for c in self._supervisor.children.values() if c.alive and c.spec.role in roles]

    def _fail_start(self, failure: DeepInferError) -> None:
        if self._stop is None:
            self._failure = failure
            log.error("%s", failure)
            self._begin_stop(time.monotonic(), 0.0, hurry=True)

    # ---- state --------------------------------------------------------------------------------------

    def _current_state(self) -> tuple[InstanceState, str]:
        if self._stop is not None:
            return "draining", "the instance is stopping"
        missing = [c for c in self._supervisor.children.values() if not c.ready]
        if not missing:
            return "ready", ""
        reason = "; ".join(f"{c.name}: {_why(c)}" for c in missing[:4])
        if len(missing) > 4:
            reason += f"; and {len(missing) - 4} more"
        return self._not_ready, reason

    def _known_state(self) -> tuple[InstanceState, str]:
        """What everybody else may know: `ready` only when no request meets a 503."""
        state, reason = self._current_state()
        if state != "ready" or self._is_announced:
            return state, reason
        names = self._frontend_status.unconfirmed(self._supervisor.by_role("frontend"))
        return self._not_ready, "; ".join(
            f"{name}: not told yet that all are ready" for name in names
        )

    @property
    def _not_ready(self) -> InstanceState:
        return "degraded" if self._was_ready else "starting"

    def _tell_state(self, now: float) -> None:
        state, reason = self._current_state()
        frontends = self._supervisor.by_role("frontend")
        is_new = self._frontend_status.change(state, reason, now)
        self._frontend_status.deliver(frontends)
        if is_new:
            self._is_announced = False
        if state == "ready":
            if not self._is_announced and self._frontend_status.all_hold(frontends, now):
                self._announce(now)
        elif is_new:
            log.log(
                logging.WARNING if state == "degraded" else logging.DEBUG, "%s: %s", state, reason
            )
            self._service.status(f"{state}: {reason}")

    def _announce(self, now: float) -> None:
        self._is_announced = True
        self._service.status(f"serving {self._plan.model_name} at {self._url}")
        if self._was_ready:
            log.info("ready again")
            return
        self._was_ready = True
        log.info("ready after %.1f s", now - self._started_at)
        self._service.ready()
        self._on_ready(self._url)

    # ---- what the control server calls --------------------------------------------------------------

    def knows(self, hello: Hello) -> str | None:
        child = self._supervisor.children.get(hello.name)
        if child is None or child.process is None or child.process.pid != hello.pid:
            return f"process {hello.pid} is not {hello.name} of this instance"
        return None

    def welcomed(self, name: ProcessName) -> None:
        """A child has joined: a frontend is told how things are with this turn, a router at once for
        whom not to wait."""
        child = self._supervisor.children[name]
        child.state = "starting"
        if child.spec.role == "frontend":
            self._frontend_status.joined(name)
        elif child.spec.role == "router":
            for other in self._supervisor.children.values():
                if other.is_given_up:
                    self._server.send(name, PeerLost(other.name, comes_back=False))

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
        """A frontend acts on what it was told of the instance."""
        self._frontend_status.held(name, serial)

    def fatal_error(self, name: ProcessName, reason: str) -> None:
        child = self._supervisor.children.get(name)
        if child is not None:
            child.fatal = reason

    def snapshot(self, snapshot: Snapshot) -> None:
        """A child's telemetry. Late ones of a dead predecessor are not taken."""
        child = self._supervisor.children.get(snapshot.name)
        if child is None or child.process is None or child.process.pid != snapshot.pid:
            return
        now = time.monotonic()
        if child.snapshot is None or snapshot.progress != child.snapshot.progress:
            child.progress_at = now
        child.snapshot = child.last_snapshot = snapshot
        child.snapshot_at = now
        if self._stop is not None and child.spec.role == "router":
            self._stop.idle_snapshots += 0 if snapshot.requests else 1

    def answer(self, what: str) -> bytes:
        return answer(what, self.view(), self._exporter)

    def living(self) -> dict[ProcessName, int]:
        children = self._supervisor.children.values()
        return {c.name: c.process.pid for c in children if c.process is not None}

    def stop_requested(self, drain_timeout: float | None) -> None:
        default = self._plan.config.drain_timeout
        self._begin_stop(time.monotonic(), default if drain_timeout is None else drain_timeout)

    def view(self) -> InstanceView:
        state, reason = self._known_state()
        return InstanceView(
            instance=self._plan.config.instance,
            state=state,
            reason=reason,
            pid=os.getpid(),
            url=self._url,
            model_name=self._plan.model_name,
            accelerator=self._plan.accelerator,
            run_dir=str(self._plan.run_dir),
            started_at=self._started_at,
            now=time.monotonic(),
            children=self._supervisor.children,
            sockets=self._server.socket_stats(),
        )

    # ---- stopping -----------------------------------------------------------------------------------

    def _begin_stop(self, now: float, drain_seconds: float, hurry: bool = False) -> None:
        if self._stop is None:
            log.info("stopping: no new requests; running ones get %g s", drain_seconds)
            self._stop = _Stop(drain_deadline=now + drain_seconds, began=now)
            self._service.stopping()
            self._service.extend_timeout(drain_seconds + 2 * TERMINATE_SECONDS + 2 * KILL_SECONDS)
            for child in self._supervisor.children.values():
                if child.alive and child.spec.role in ("frontend", "router"):
                    self._server.send(child.name, Drain())
            if not self._was_ready:
                self._stop.drain_deadline = now
        if hurry:
            self._stop.drain_deadline = now

    def _go_on_stopping(self, stop: _Stop, now: float) -> None:
        if stop.terminated is None:
            routers = [child for child in self._supervisor.by_role("router") if child.ready]
            # One snapshot may have been on its way when the drain began; the second is newer.
            idle = stop.idle_snapshots >= 2 or not routers or now >= stop.drain_deadline
            if idle and stop.drained is None:
                stop.drained = now
                self._supervisor.terminate("frontend")
            frontends = any(child.alive for child in self._supervisor.by_role("frontend"))
            if stop.drained is not None and (
                not frontends or now - stop.drained > TERMINATE_SECONDS
            ):
                stop.terminated = now
                self._supervisor.terminate()
        elif stop.killed is None:
            if now - stop.terminated > TERMINATE_SECONDS:
                self._kill(now)
        elif now - stop.killed > KILL_SECONDS:
            raise DeepInferError(f"These processes do not end: {self._left()}.")

    def _kill(self, now: float) -> None:
        if self._stop is not None and self._stop.killed is None:
            log.warning("killing what has not ended: %s", self._left())
            self._stop.terminated = self._stop.killed = now
            self._supervisor.kill()

    def _left(self) -> str:
        return ", ".join(c.name for c in self._supervisor.children.values() if c.alive)


def _why(child: Child) -> str:
    if child.fatal:
        return child.fatal
    if not child.alive:
        return f"ended with {child.last_exit}" if child.last_exit else "not started"
    if child.silent:
        return "gives no sign of life"
    return child.detail or child.state or "starting"
