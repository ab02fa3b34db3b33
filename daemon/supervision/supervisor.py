"""The children of an instance: started, watched, started again, ended. No sockets in here.

All of it runs on the daemon's main thread: the kernel's parent-death signal follows the thread
that started a child.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from daemon.supervision.child_output import ChildOutput
from daemon.supervision.child_process import ChildProcess, ChildSpec, describe_exit
from daemon.supervision.memory_watch import MemoryWatch
from daemon.supervision.restart_policy import RestartPolicy
from transport.child import EXIT_FATAL
from transport.ids import ProcessName
from transport.messages.telemetry import ProcessState, Snapshot

log = logging.getLogger(__name__)


@dataclass
class Child:
    """What the daemon knows of one process of the instance, across its restarts."""

    spec: ChildSpec
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    process: ChildProcess | None = None
    state: ProcessState | None = None
    """What it last said; None: not heard of since its start."""
    detail: str = ""
    snapshot: Snapshot | None = None
    last_snapshot: Snapshot | None = None
    """Outlives the process, because what it had counted must not be lost."""
    started_at: float = 0.0
    """When its process was started."""
    snapshot_at: float = 0.0
    progress_at: float = 0.0
    """When its progress counter was last seen to grow."""
    served_from: float | None = None
    """When it was first ready since its start; None: not yet."""
    silent: bool = False
    """Whether its heartbeats have stopped (see `daemon/supervision/hang_watch.py`)."""
    is_killed: bool = False
    """Whether it hung and has been sent SIGKILL."""
    restarts: int = 0
    restart_at: float | None = None
    """When it will be started again."""
    last_exit: str = ""
    fatal: str = ""
    """Why it must not be started again."""

    @property
    def name(self) -> ProcessName:
        return self.spec.name

    @property
    def has_served(self) -> bool:
        return self.served_from is not None

    @property
    def served_seconds(self) -> float:
        return 0.0 if self.served_from is None else self.progress_at - self.served_from

    @property
    def alive(self) -> bool:
        return self.process is not None

    @property
    def is_given_up(self) -> bool:
        return bool(self.fatal) and not self.alive

    @property
    def ready(self) -> bool:
        return self.alive and self.state == "ready" and not self.silent


@dataclass(frozen=True)
class Death:
    """A child has ended without having been told to."""

    child: Child
    pid: int
    reason: str
    hopeless: bool
    """A restart would not help, or has not helped often enough."""


class Supervisor:
    """Owner of all child processes and of their process group."""

    def __init__(
        self,
        specs: Iterable[ChildSpec],
        record_pids: Callable[[list[int]], None],
        output: ChildOutput,
    ) -> None:
        """`record_pids` is told all living children after each change; `output` gets what they print."""
        self.children: dict[ProcessName, Child] = {spec.name: Child(spec) for spec in specs}
        self._record_pids = record_pids
        self._output = output
        self._memory = MemoryWatch()
        self._process_group = 0
        self._stopping = False

    def start_all(self) -> None:
        """Start every child.

        Raises:
            DeepInferError: the operating system refuses.
        """
        for child in self.children.values():
            self._start(child)
        self._record()

    def pidfds(self) -> dict[int, Child]:
        return {process.pidfd: child for child, process in self._living()}

    def _living(self) -> list[tuple[Child, ChildProcess]]:
        return [(c, c.process) for c in self.children.values() if c.process is not None]

    def collect_deaths(self, now: float, give_up_on_loops: bool) -> list[Death]:
        """Reap what has ended and plan its restart. With `give_up_on_loops`, meant for the start, a
        child that keeps dying is hopeless."""
        deaths = []
        ended = [
            (child, process, code)
            for child, process in self._living()
            if (code := process.reap()) is not None
        ]
        memory = (
            self._memory.explain() if any(code == -signal.SIGKILL for *_, code in ended) else ""
        )
        for child, process, code in ended:
            process.close()
            self._output.read_all()  # its last words come before ours about its death
            child.process = None
            child.last_exit = describe_exit(code)
            advice = memory if code == -signal.SIGKILL and not child.is_killed else ""
            if advice:
                child.last_exit += ", probably for lack of memory"
            child.state, child.detail, child.snapshot = None, "", None
            if self._stopping:
                continue
            if code == EXIT_FATAL and not child.fatal:
                child.fatal = f"it ended with {child.last_exit}; the log says why"
            delay = child.policy.died(child.served_seconds)
            hopeless = bool(child.fatal) or (give_up_on_loops and child.policy.looping_at_start)
            child.restart_at = None if hopeless else now + delay
            reason = child.fatal or child.last_exit + (f"; {advice}" if advice else "")
            log.warning(
                "%s has ended (%s); %s", child.name, reason,
                "it is not started again" if hopeless else f"a new one starts in {delay:g} s",
            )  # fmt: skip
            deaths.append(Death(child, process.pid, reason, hopeless))
        if deaths:
            self._record()
        return deaths

    def restart_due(self, now: float) -> None:
        started = False
        for child in self.children.values():
            if child.restart_at is not None and child.restart_at <= now and not self._stopping:
                child.restarts += 1
                self._start(child)
                started = True
        if started:
            self._record()

    def next_restart(self) -> float | None:
        times = [c.restart_at for c in self.children.values() if c.restart_at is not None]
        return min(times, default=None)

    def terminate(self, role: str | None = None) -> None:
        """Send SIGTERM to all children, or to those of one role. None is started again from now
        on."""
        self._stopping = True
        for child in self.children.values():
            child.restart_at = None
            if child.process is not None and role in (None, child.spec.role):
                child.process.signal(signal.SIGTERM)

    def kill(self) -> None:
        self._stopping = True
        if self._process_group and self.num_alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process_group, signal.SIGKILL)
        for child in self.children.values():
            if child.process is not None:
                child.process.signal(signal.SIGKILL)

    def wait_until_gone(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        poller = select.poll()
        for pidfd, child in self.pidfds().items():
            poller.register(pidfd, select.POLLIN)
            left = max(deadline - time.monotonic(), 0.0)
            if poller.poll(left * 1000) and child.process is not None:
                child.process.reap()
            poller.unregister(pidfd)
        self.collect_deaths(time.monotonic(), give_up_on_loops=False)
        return self.num_alive == 0

    def kill_hung(self, child: Child, reason: str) -> None:
        if child.process is not None and not child.is_killed:
            child.is_killed = True
            log.error("%s hangs (%s): it is killed", child.name, reason)
            child.process.signal(signal.SIGKILL)

    @property
    def num_alive(self) -> int:
        return sum(child.alive for child in self.children.values())

    def by_role(self, role: str) -> list[Child]:
        return [child for child in self.children.values() if child.spec.role == role]

    def _start(self, child: Child) -> None:
        # A group ends with its last member; its number must not be joined again then.
        group = self._process_group if self.num_alive else 0
        child.restart_at = None
        child.process = ChildProcess(child.spec, group, self._output)
        child.started_at = child.snapshot_at = child.progress_at = time.monotonic()
        child.served_from = None
        child.silent = child.is_killed = False
        self._process_group = child.process.process_group
        log.info("%s starts, process %d", child.name, child.process.pid)

    def _record(self) -> None:
        self._record_pids([process.pid for _, process in self._living()])
