"""Messages to the daemon: from its processes, and from clients (command line, frontends)."""

from __future__ import annotations

from typing import Final

from msgspec.msgpack import Decoder

from transport.messages.base import Hello, Message
from transport.messages.control import CacheCommand, DumpStacks, SetLogLevel
from transport.messages.telemetry import ProcessState, Snapshot


class StateChanged(Message, frozen=True):
    """A process is loading, ready, ... `detail` tells why a start takes long."""

    state: ProcessState
    detail: str = ""


class FatalError(Message, frozen=True):
    """A process is about to exit for a reason that a restart would not cure."""

    reason: str


class StatusHeld(Message, frozen=True):
    """A frontend acts on the last `InstanceStatus`. If that was `ready`, the frontend lets requests
    in: it also knows what the router serves."""

    serial: int
    """That of the `InstanceStatus`."""


class CommandDone(Message, frozen=True):
    """A process has carried out a command. Frame 0: empty, or JSON: the threads for
    `DumpStacks`, the cache's content for `CacheCommand`."""

    serial: int


class Query(Message, frozen=True):
    """A client asks for `status`, `processes`, `requests`, `queues`, `cache`, `sockets`, `keys`,
    `metrics` or `state`. Answered with `Answer`."""

    what: str
    serial: int = 0


class StopInstance(Message, frozen=True):
    """A client wants the instance to stop. Answered with `Answer` at once; the stop itself is
    watched through the run directory's lock."""

    drain_timeout: float | None = None
    serial: int = 0


class ReloadKeys(Message, frozen=True):
    """A client wants the files of API keys to be read again. Answered with `Answer`: the `KeysReport`,
    or why the keys stay as they are."""

    serial: int = 0


ToDaemon = (
    Hello
    | StateChanged
    | FatalError
    | StatusHeld
    | CommandDone
    | Query
    | StopInstance
    | ReloadKeys
    | DumpStacks
    | SetLogLevel
    | CacheCommand
)
TO_DAEMON: Final[Decoder[ToDaemon]] = Decoder(ToDaemon)
SNAPSHOTS: Final[Decoder[Snapshot]] = Decoder(Snapshot)
"""What arrives at the daemon's telemetry socket."""
