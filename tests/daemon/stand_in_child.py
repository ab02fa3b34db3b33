"""A child that joins like any other and then does what its settings say (see test_instance.py)."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import msgspec
import zmq

from transport.child import EXIT_FATAL, ProcessSettings, enter_process
from transport.links.daemon import DaemonLink
from transport.links.errors import LinkError
from transport.messages.any import ANY_MESSAGE
from transport.messages.from_daemon import Drain, InstanceStatus, PeerLost
from transport.messages.to_daemon import StatusHeld
from transport.telemetry.metrics import MetricSet


class StandInSettings(msgspec.Struct, frozen=True):
    """`act`: ready, never-ready, crash, fatal, deaf (ignores SIGTERM), mortal (SIGTERM ends it for
    good), reserved (confirms what it hears of the instance only while there is a file `confirm` beside
    the journal)."""

    process: ProcessSettings
    act: str
    journal: str
    """File to which the child writes what it hears."""


def main() -> int:
    settings, stop = enter_process(StandInSettings)

    unconfirmed: list[int] = []

    def confirm() -> None:
        if settings.act != "reserved" or Path(settings.journal).with_name("confirm").exists():
            while unconfirmed:
                link.post(StatusHeld(unconfirmed.pop(0)))

    def hear(message, _frames) -> None:
        match message:
            case InstanceStatus(state, reason, serial, keys):
                told = f"status {state} {reason}"
                if keys.users:
                    told += f" with keys {b','.join(keys.users).decode()}"
                note(settings, told)
                unconfirmed.append(serial)
                confirm()
            case Drain():
                note(settings, "drain")
            case PeerLost(name, comes_back):
                note(settings, f"PeerLost {name}" + ("" if comes_back else " for good"))
            case other:
                note(settings, type(other).__name__ + " " + getattr(other, "name", ""))

    context = zmq.Context()
    link = DaemonLink(context, settings.process, MetricSet(), ANY_MESSAGE)
    try:
        link.start(hear)
    except LinkError as error:
        note(settings, f"refused {error}")
        return 1
    try:
        if settings.act == "crash":
            return 3
        if settings.act == "fatal":
            link.fatal("the disk is on fire")
            return EXIT_FATAL
        link.set_state("loading", "its socks")
        if settings.act != "never-ready":
            link.set_state("ready")
        deadline = time.monotonic() + 60
        while not stop.wait(0.05) and time.monotonic() < deadline:
            confirm()
        while settings.act == "deaf":
            time.sleep(60)
        return EXIT_FATAL if settings.act == "mortal" else 0
    finally:
        link.close()
        context.term()


def note(settings: StandInSettings, text: str) -> None:
    line = f"{settings.process.name} {os.getpid()} {text}\n".encode()
    fd = os.open(settings.journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, line)
    os.close(fd)


if __name__ == "__main__":
    sys.exit(main())
