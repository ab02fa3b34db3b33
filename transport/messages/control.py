"""Between the daemon, its processes, and clients (command line, frontends)."""

from __future__ import annotations

from typing import Literal

from transport.ids import ProcessName
from transport.messages.base import Message
from transport.messages.telemetry import ProcessState

InstanceState = Literal["starting", "ready", "degraded", "draining"]


CacheAction = Literal["report", "flush"]


class StateChanged(Message, frozen=True):
    """A process tells the daemon that it is loading, ready, ... ; also the daemon's means to know
    why a start takes long."""

    state: ProcessState
    detail: str = ""


class FatalError(Message, frozen=True):
    """A process is about to exit for a reason that a restart would not cure."""

    reason: str


class InstanceStatus(Message, frozen=True):
    """Daemon -> frontends: may requests come in? Answered with `StatusHeld`."""

    state: InstanceState
    reason: str = ""
    serial: int = 0
    """0: nobody waits for the answer."""


class StatusHeld(Message, frozen=True):
    """Frontend -> daemon: it acts on the last `InstanceStatus`. Of `ready` that means that it lets
    requests in: it also knows what the router serves."""

    serial: int
    """Of that `InstanceStatus`."""


class PeerLost(Message, frozen=True):
    """A process is gone. Daemon -> router: whatever it held must go elsewhere. Of the router itself
    daemon -> workers and tokenizers: they drop its work and join the new one."""

    name: ProcessName
    comes_back: bool = True
    """Whether the daemon starts another one."""
    pid: int = 0
    """Which process of that name; 0: whichever there is."""


class Drain(Message, frozen=True):
    """Daemon -> frontends and router: take no new requests, finish the running ones."""


class Query(Message, frozen=True):
    """Ask the daemon: `status`, `processes`, `requests`, `queues`, `cache`, `sockets`, `metrics`,
    `state`. Answered with `Answer`."""

    what: str
    serial: int = 0


class Answer(Message, frozen=True):
    """Frame 0: the answer — JSON, or for `metrics` the Prometheus exposition text."""

    serial: int
    error: str = ""


class StopInstance(Message, frozen=True):
    """Client -> daemon: stop the instance. Answered with `Answer` at once; the stop itself is
    watched through the run directory's lock."""

    drain_timeout: float | None = None
    serial: int = 0


class DumpStacks(Message, frozen=True):
    """Where is every thread of a process? From a client to the daemon, which answers with `Answer`
    and the stacks, and from the daemon to the process."""

    serial: int
    process: ProcessName = ProcessName("")
    """Empty: all processes."""


class SetLogLevel(Message, frozen=True):
    """Log more or less from now on. On the same ways as `DumpStacks`."""

    level: str
    serial: int
    process: ProcessName = ProcessName("")


class CacheCommand(Message, frozen=True):
    """Tell about the host prefix cache of a worker (`report`), or empty it (`flush`). As `DumpStacks`,
    to workers only."""

    action: CacheAction
    serial: int
    process: ProcessName = ProcessName("")
    """Empty: all workers."""


ProcessCommand = DumpStacks | SetLogLevel | CacheCommand
"""What a client has the daemon pass on to processes."""


class CommandDone(Message, frozen=True):
    """Process -> daemon: a command has been carried out. Frame 0: empty, or JSON: the threads for
    `DumpStacks`, the cache's content for `CacheCommand`."""

    serial: int
