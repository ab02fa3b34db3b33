"""Commands to processes: a client gives them to the daemon, which passes them on."""

from __future__ import annotations

from typing import Literal

from transport.ids import ProcessName
from transport.messages.base import Message

CacheAction = Literal["report", "flush"]


class DumpStacks(Message, frozen=True):
    """Where is every thread of a process? A client gets the stacks with `Answer`, the daemon with
    `CommandDone`."""

    serial: int
    process: ProcessName = ProcessName("")
    """Empty: all processes."""


class SetLogLevel(Message, frozen=True):
    """Log more or less from now on."""

    level: str
    serial: int
    process: ProcessName = ProcessName("")


class CacheCommand(Message, frozen=True):
    """Tell about the host prefix cache of a worker (`report`), or empty it (`flush`)."""

    action: CacheAction
    serial: int
    process: ProcessName = ProcessName("")
    """Empty: all workers."""


ProcessCommand = DumpStacks | SetLogLevel | CacheCommand
