"""Commands of a client to the processes, passed on by the daemon: stacks, log level, prefix cache.

The client gets one answer, at the latest after GIVE_UP_SECONDS and a turn of the daemon's loop: it
says of every process what came of it, also of those that do not answer.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import psutil
import zmq

from daemon.inspection.report_types import CommandReport
from daemon.metrics.exposition import DAEMON_NAME
from transport.ids import ProcessName
from transport.logs import LEVELS, set_level
from transport.messages.cache_report import CacheContent
from transport.messages.control import CacheCommand, DumpStacks, ProcessCommand, SetLogLevel
from transport.messages.from_daemon import Answer
from transport.messages.to_daemon import ToDaemon
from transport.sockets import RouterSocket
from transport.stacks import ThreadStack, thread_stacks

GIVE_UP_SECONDS: Final = 2.0
"""How long a process may take to answer. Its answering thread has nothing else to do."""
MAX_COMMANDS: Final = 64
"""Commands under way at the same time."""

log = logging.getLogger(__name__)


class CommandError(ValueError):
    """A command that cannot be carried out at all; the text goes to whoever gave it."""


@dataclass
class _UnderWay:
    """One command: who gave it, whose answers are missing, what is known."""

    client: ProcessName
    serial: int
    deadline: float
    command: ProcessCommand
    missing: dict[ProcessName, int] = field(default_factory=dict)
    """Name -> pid."""
    reports: list[CommandReport] = field(default_factory=list)


class CommandRelay:
    """The commands under way. Sends over the control socket, which it does not own."""

    def __init__(self, control: RouterSocket[ToDaemon]) -> None:
        self._control = control
        self._serials = itertools.count(1)
        self._under_way: dict[int, _UnderWay] = {}

    def start(
        self,
        client: ProcessName,
        command: ProcessCommand,
        living: Mapping[ProcessName, int],
        now: float,
    ) -> None:
        """Pass a client's command on. `living`: the pids of all children.

        Raises:
            CommandError: there is no such process or level, or too much to do.
        """
        wanted = self._check(command, living)
        serial = next(self._serials)
        work = _UnderWay(client, command.serial, now + GIVE_UP_SECONDS, command)
        if command.process in ("", DAEMON_NAME) and not isinstance(command, CacheCommand):
            work.reports.append(_done_here(command))
        forwarded = msgspec.structs.replace(command, serial=serial)
        for name, pid in wanted.items():
            if self._control.send(name, forwarded):
                work.missing[name] = pid
            else:
                problem = "it is starting, or has not read what it was told before: try again"
                work.reports.append(CommandReport(name, pid, problem=problem))
        self._under_way[serial] = work
        self._finish(serial)

    def done(self, peer: ProcessName, serial: int, frames: Sequence[zmq.Frame]) -> None:
        work = self._under_way.get(serial)
        pid = None if work is None else work.missing.pop(peer, None)
        if work is None or pid is None:
            log.debug("%s answered a command too late", peer)
            return
        data = bytes(frames[0].buffer) if frames else b""
        try:
            work.reports.append(_read_answer(work.command, peer, pid, data))
        except msgspec.DecodeError as error:
            work.reports.append(CommandReport(peer, pid, problem=f"its answer is damaged: {error}"))
        self._finish(serial)

    def give_up(self, now: float) -> None:
        for serial, work in list(self._under_way.items()):
            if now < work.deadline:
                continue
            for name, pid in work.missing.items():
                work.reports.append(
                    CommandReport(name, pid, problem=_why_silent(pid, work.command))
                )
            work.missing.clear()
            self._finish(serial)

    def _check(
        self, command: ProcessCommand, living: Mapping[ProcessName, int]
    ) -> Mapping[ProcessName, int]:
        if isinstance(command, SetLogLevel) and command.level not in LEVELS:
            raise CommandError(f"There is no level {command.level!r}: {', '.join(LEVELS)}")
        if len(self._under_way) >= MAX_COMMANDS:
            raise CommandError("Too many commands are under way: try again in a few seconds")
        name = command.process
        if isinstance(command, CacheCommand):
            living = {peer: pid for peer, pid in living.items() if peer.startswith("worker/")}
        if not name:
            return living
        if name == DAEMON_NAME and not isinstance(command, CacheCommand):
            return {}
        if name not in living:
            known = ", ".join(
                living if isinstance(command, CacheCommand) else [DAEMON_NAME, *living]
            )
            raise CommandError(f"There is no process {name!r} now: {known}")
        return {name: living[name]}

    def _finish(self, serial: int) -> None:
        work = self._under_way[serial]
        if work.missing:
            return
        del self._under_way[serial]
        work.reports.sort(key=lambda report: (report.process != DAEMON_NAME, report.process))
        self._control.send(work.client, Answer(work.serial), msgspec.json.encode(work.reports))


def _why_silent(pid: int, command: ProcessCommand) -> str:
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "it has ended meanwhile"
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return f"it is stopped (SIGSTOP or a debugger); `kill -CONT {pid}` lets it go on"
    if isinstance(command, CacheCommand):
        return (
            f"it did not answer within {GIVE_UP_SECONDS:g} s: it is starting, or in the middle of a long "
            "step, and does it after that"
        )
    return (
        f"it did not answer within {GIVE_UP_SECONDS:g} s (its state is {status}): it is starting, or "
        "hangs in native code, which a debugger can show"
    )


def _read_answer(
    command: ProcessCommand, peer: ProcessName, pid: int, data: bytes
) -> CommandReport:
    match command:
        case DumpStacks():
            threads = msgspec.json.decode(data, type=list[ThreadStack])
            return CommandReport(peer, pid, threads=threads)
        case CacheCommand():
            content = msgspec.json.decode(data, type=CacheContent)
            return CommandReport(peer, pid, cache=content)
        case SetLogLevel(level):
            return CommandReport(peer, pid, log_level=level)


def _done_here(command: DumpStacks | SetLogLevel) -> CommandReport:
    pid = os.getpid()
    if isinstance(command, SetLogLevel):
        set_level(command.level)
        log.info("the log level is %s from now on", command.level)
        return CommandReport(DAEMON_NAME, pid, log_level=command.level)
    return CommandReport(DAEMON_NAME, pid, threads=thread_stacks())
