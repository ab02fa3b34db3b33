"""What every process of an instance does first, and how it learns that it has to stop.

The daemon starts `transport/launch.py PACKAGE.run` with a pipe as standard input, writes the settings as one
line of JSON and keeps the pipe open: when it closes, the daemon is gone and so is the child. The
kernel's parent-death signal is the second belt (each has holes that the other covers).
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
from types import FrameType
from typing import Protocol, TypeVar

import msgspec
import setproctitle

from transport.frame_limits import REPORT_BYTES
from transport.ids import ProcessName
from transport.logs import configure_logging
from transport.messages.base import PROTOCOL_VERSION, Hello, Role
from transport.output import use_lossy_output

PR_SET_PDEATHSIG = 1
EXIT_FATAL = 78
"""Exit code of a child for a reason that a restart would not cure (EX_CONFIG of sysexits.h)."""
EXIT_AGAIN = 1
"""For any other reason: the daemon starts a new one."""
EXIT_ORPHANED = 86
MAX_SETTINGS_BYTES = 1 << 20
_GIVING_WAY = 5
"""A third of the weight of the others."""

log = logging.getLogger(__name__)


class ProcessSettings(msgspec.Struct, frozen=True):
    """What a process of any role needs to join its instance."""

    name: ProcessName
    role: Role
    instance: str
    run_dir: str
    parent_pid: int
    config_hash: str
    log_level: str = "info"
    max_frame: int = REPORT_BYTES
    """Of the links to the router, in bytes."""
    heartbeat_seconds: float = 0.5
    """Time between two snapshots."""
    connect_seconds: float = 30.0
    """How long to wait for the router and the daemon to answer `Hello`."""

    def hello(self) -> Hello:
        return Hello(PROTOCOL_VERSION, self.role, self.name, os.getpid(), self.config_hash)


class HasProcessSettings(Protocol):
    """Settings of one role: its own fields beside the common ones."""

    @property
    def process(self) -> ProcessSettings: ...


SettingsT = TypeVar("SettingsT", bound=HasProcessSettings)


class StopFlag:
    """Set by SIGTERM. Pollers watch `fd`; loops ask `is_set()`."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._event = threading.Event()

    def set(self) -> None:
        """Ask the process to stop. Safe in a signal handler and from any thread."""
        self._event.set()
        os.eventfd_write(self.fd, 1)

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout: float) -> bool:
        return self._event.wait(timeout)


def enter_process(settings_type: type[SettingsT]) -> tuple[SettingsT, StopFlag]:
    """Read the settings from standard input and become a process of the instance.

    Must be called from the main thread, before other threads are started. Exits the process if the
    settings cannot be read or the parent is already gone.
    """
    line = sys.stdin.buffer.readline(MAX_SETTINGS_BYTES)
    try:
        settings = msgspec.json.decode(line, type=settings_type)
    except msgspec.DecodeError as error:
        sys.exit(f"this program is started by the deepinfer daemon, not by hand ({error})")
    process = settings.process
    die_with_parent(process.parent_pid)
    setproctitle.setproctitle(f"deepinfer:{process.name} [{process.instance}]")
    setproctitle.setthreadtitle(f"di:{process.name}"[:15])
    use_lossy_output()
    configure_logging(process.name, process.log_level)
    stop = StopFlag()

    def handle_term(_signal: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, handle_term)
    # A terminal sends Ctrl-C to the whole group; only the daemon acts on it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_at_end_of_input, name="death-pipe", daemon=True).start()
    return settings, stop


def give_way() -> None:
    """For a process that works long on a single client's request: those that serve everybody get the
    processor first."""
    os.nice(_GIVING_WAY)


def die_with_parent(parent_pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        log.warning("no parent-death signal: %s", os.strerror(ctypes.get_errno()))
    if os.getppid() != parent_pid:
        os._exit(EXIT_ORPHANED)


def _exit_at_end_of_input() -> None:
    while os.read(0, 4096):
        pass
    os._exit(EXIT_ORPHANED)
