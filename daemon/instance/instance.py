"""The daemon's main loop: one instance from its first process to its last file.

One thread, one poller over the control and telemetry sockets, the children's pidfds and the signals;
nothing here waits for anything else.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from typing import Final

import zmq

from daemon.errors import ConfigurationError, DeepInferError
from daemon.inspection.control_server import ControlServer, QueryError
from daemon.inspection.state_report import answer
from daemon.instance.frontend_status import FrontendStatus
from daemon.instance.key_ring import KeyRing
from daemon.instance.phase import Event, Lifecycle, Phase, next_phase
from daemon.instance.process_reports import ProcessReports
from daemon.instance.role_settings import InstancePlan
from daemon.instance.shutdown import KILL_SECONDS, TERMINATE_SECONDS, Shutdown
from daemon.metrics.exposition import MetricsExporter
from daemon.supervision.hang_watch import HangWatch
from daemon.supervision.instance_view import InstanceView
from daemon.supervision.supervisor import Child, Death, Supervisor
from daemon.system.listen import base_url
from daemon.system.sd_notify import ServiceManager, watchdog_seconds
from daemon.system.stop_signals import StopSignals
from transport.messages.from_daemon import InstanceStatus, PeerLost

TURN_SECONDS: Final = 0.5
"""Longest sleep of the main loop: timers are at most this late."""
EXTEND_SECONDS: Final = 60.0
"""How much longer systemd is asked to wait, each turn, while the instance loads."""

log = logging.getLogger(__name__)


class Instance:
    """Runs one instance. Owns the supervisor and, given to it, the control server."""

    def __init__(
        self,
        plan: InstancePlan,
        supervisor: Supervisor,
        server: ControlServer,
        port: int,
        keys: KeyRing,
        on_ready: Callable[[str], None],
    ) -> None:
        """`on_ready` is called once, with the instance's URL, when it first serves."""
        config = plan.config
        self._plan = plan
        self._supervisor = supervisor
        self._server = server
        self._url = base_url(config.host, port)
        self._keys = keys
        self._on_ready = on_ready
        self._service = ServiceManager()
        self._watchdog = watchdog_seconds()
        self._exporter = MetricsExporter()
        self._hang_watch = HangWatch(
            config.heartbeat_seconds,
            config.hang_seconds,
            config.stall_seconds,
            config.start_timeout,
        )
        self._started_at = time.monotonic()
        self._lifecycle = Lifecycle(self._started_at)
        self._shutdown = Shutdown(self._lifecycle, supervisor, server.send)
        self._frontend_status = FrontendStatus(
            server.send,
            InstanceStatus("starting", "the processes are being started", 1, keys.keys),
            self._started_at,
        )
        self._reports = ProcessReports(
            supervisor, self._frontend_status, server.send, self._shutdown.router_told
        )
        self._failure: DeepInferError | None = None

    def run(self, signals: StopSignals) -> None:
        """Start everything, serve, and return when all processes are gone.

        Raises:
            ConfigurationError: it could not start, and the same again would not.
            DeepInferError: it could not start, or a process does not end.
        """
        try:
            self._supervisor.start_all()
            while not self._phase.is_stopping or self._supervisor.num_alive:
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

    @property
    def _phase(self) -> Phase:
        return self._lifecycle.phase

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
            self._stop(self._plan.config.drain_timeout, now)
            if signals.count > 1:
                self._shutdown.hurry(now)
            if signals.count > 2:
                self._shutdown.kill(now)
        if signals.take_hangup():
            self._reload_keys_at_hangup()
        self._server.handle_incoming(self._reports, self)
        for death in self._supervisor.collect_deaths(now, not self._phase.has_served):
            self._on_death(death, now)
        self._supervisor.restart_due(now)
        if not self._phase.is_stopping:
            for hung in self._hang_watch.look(self._supervisor.children.values(), now):
                self._supervisor.kill_hung(hung.child, hung.reason)
        self._check_start(now)
        self._shutdown.go_on(now)
        self._tell_frontends(now)
        self._tell_service_manager(now)

    def _check_start(self, now: float) -> None:
        seconds = self._plan.config.start_timeout
        if not self._phase.has_served and now - self._started_at > seconds:
            reason = self._view(now).reason
            failure = DeepInferError(
                f"The instance was not ready after {seconds:g} s ({reason}): "
                "raise --start-timeout or read the log."
            )
            self._fail(failure, 0.0, now)

    def _tell_frontends(self, now: float) -> None:
        self._lifecycle.take(self._readiness(), now)
        state = self._phase.for_frontends
        frontends = self._supervisor.by_role("frontend")
        is_new = self._frontend_status.change(state, self._reason(self._phase), now)
        self._frontend_status.deliver(frontends)
        if state == "ready":
            if self._phase is not Phase.SERVING and self._frontend_status.all_hold(frontends, now):
                self._serve(now)
        elif is_new:
            reason = self._frontend_status.status.reason
            level = logging.WARNING if state == "degraded" else logging.DEBUG
            log.log(level, "%s: %s", state, reason)
            self._service.status(f"{state}: {reason}")

    def _serve(self, now: float) -> None:
        is_first = self._phase is Phase.CONFIRMING
        self._lifecycle.take(Event.CONFIRMED, now)
        self._service.status(f"serving {self._plan.model_name} at {self._url}")
        if not is_first:
            log.info("ready again")
            return
        log.info("ready after %.1f s", now - self._started_at)
        self._service.ready()
        self._on_ready(self._url)

    def _tell_service_manager(self, now: float) -> None:
        if not self._phase.has_served:
            self._service.extend_timeout(EXTEND_SECONDS)
        self._service.deliver()
        if self._watchdog is not None and self._makes_progress(now, self._watchdog):
            self._service.watchdog()

    def _makes_progress(self, now: float, seconds: float) -> bool:
        workers = self._supervisor.by_role("worker")
        serving = (c for c in workers if c.alive and c.state == "ready")
        return all(now - c.progress_at < seconds / 2 for c in serving)

    # ---- deaths and stops -------------------------------------------------------------------------

    def _on_death(self, death: Death, now: float) -> None:
        child = death.child
        if child.last_snapshot is not None:
            self._exporter.process_ended(child.last_snapshot)
            child.last_snapshot = None
        for peer in self._concerned_by(child):
            self._server.send(peer.name, PeerLost(child.name, not death.hopeless, death.pid))
        if death.hopeless and not self._phase.has_served:
            # What a restart does not cure lies in the model, the options or the machine.
            kind = ConfigurationError if child.fatal else DeepInferError
            reason = death.reason.rstrip(".")
            self._fail(kind(f"{child.name} cannot start: {reason}."), 0.0, now)
        elif death.hopeless and not self._phase.is_stopping and self._is_last(child):
            # Nothing can be served any more. A service manager starts another instance after an error.
            failure = DeepInferError(
                f"The instance ends, for no {child.spec.role} is left: {child.name} is lost for good "
                f"({death.reason})."
            )
            self._fail(failure, self._plan.config.drain_timeout, now)

    def _is_last(self, lost: Child) -> bool:
        return all(child.is_given_up for child in self._supervisor.by_role(lost.spec.role))

    def _concerned_by(self, lost: Child) -> list[Child]:
        """Who must know of a loss: the router, or if it was the router, those that have to join the
        new one. Frontends watch their connection to the router themselves."""
        roles = ("worker", "tokenizer") if lost.spec.role == "router" else ("router",)
        return [c for c in self._supervisor.children.values() if c.alive and c.spec.role in roles]

    def _fail(self, failure: DeepInferError, drain_seconds: float, now: float) -> None:
        self._failure = failure
        log.error("%s", failure)
        self._stop(drain_seconds, now)

    def _stop(self, drain_seconds: float, now: float) -> None:
        if self._shutdown.begin(drain_seconds, now):
            log.info("stopping: no new requests; running ones get %g s", drain_seconds)
            self._service.stopping()
            self._service.extend_timeout(drain_seconds + 2 * TERMINATE_SECONDS + 2 * KILL_SECONDS)

    # ---- what is told of it -----------------------------------------------------------------------

    def answer(self, what: str) -> bytes:
        return answer(what, self._view(time.monotonic()), self._exporter)

    def stop_requested(self, drain_timeout: float | None) -> None:
        default = self._plan.config.drain_timeout
        self._stop(default if drain_timeout is None else drain_timeout, time.monotonic())

    def reload_keys(self) -> None:
        try:
            self._keys.reload()
        except ConfigurationError as error:
            raise QueryError(f"{str(error).rstrip('.')}; the keys stay as they are") from error
        self._frontend_status.use_keys(self._keys.keys, time.monotonic())

    def _reload_keys_at_hangup(self) -> None:
        try:
            self.reload_keys()
        except QueryError as error:
            log.error("%s.", error)

    def _view(self, now: float) -> InstanceView:
        # A process may have been lost, or become ready, since the last turn.
        phase = next_phase(self._phase, self._readiness())
        return InstanceView(
            instance=self._plan.config.instance,
            state=phase.for_others,
            reason=self._reason(phase) or self._awaited(phase),
            pid=os.getpid(),
            url=self._url,
            model_name=self._plan.model_name,
            accelerator=self._plan.accelerator,
            run_dir=str(self._plan.run_dir),
            started_at=self._started_at,
            now=now,
            children=self._supervisor.children,
            sockets=self._server.socket_stats(),
            keys=self._keys.keys,
            unconfirmed=self._frontend_status.unconfirmed(self._supervisor.by_role("frontend")),
        )

    def _readiness(self) -> Event:
        return Event.ONE_MISSING if self._missing() else Event.ALL_READY

    def _missing(self) -> list[Child]:
        return [child for child in self._supervisor.children.values() if not child.ready]

    def _reason(self, phase: Phase) -> str:
        if phase.is_stopping:
            return "the instance is stopping"
        missing = self._missing()
        reason = "; ".join(f"{child.name}: {_why(child)}" for child in missing[:4])
        return reason + (f"; and {len(missing) - 4} more" if len(missing) > 4 else "")

    def _awaited(self, phase: Phase) -> str:
        if phase is Phase.SERVING:
            return ""
        names = self._frontend_status.unconfirmed(self._supervisor.by_role("frontend"))
        return "; ".join(f"{name}: not told yet that all are ready" for name in names)


def _why(child: Child) -> str:
    if child.fatal:
        return child.fatal
    if not child.alive:
        return f"ended with {child.last_exit}" if child.last_exit else "not started"
    if child.silent:
        return "gives no sign of life"
    return child.detail or child.state or "starting"
