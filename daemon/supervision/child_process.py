"""One child of the daemon: started with its settings on a pipe that stays open, watched by pidfd."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from daemon.errors import DeepInferError
from daemon.supervision.child_output import ChildOutput
from transport.ids import ProcessName
from transport.launch import launch_environment, python_command
from transport.messages.base import Role

QUIET_ENVIRONMENT: Final = {
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
NOT_INHERITED: Final = (
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "LISTEN_FDS",
    "LISTEN_PID",
    "PYTHONOPTIMIZE",
)
"""Meant for the daemon alone; with PYTHONOPTIMIZE=2 there are no docstrings, without which transformers
loads no model."""


@dataclass(frozen=True)
class ChildSpec:
    """How to start one child. `settings` is one line of JSON."""

    name: ProcessName
    role: Role
    module: str
    settings: bytes
    environment: Mapping[str, str] = field(default_factory=dict)
    pass_fds: tuple[int, ...] = ()


class ChildProcess:
    """A running child; the daemon's main thread owns it.

    The kernel's parent-death signal follows the *thread* that started the child, so this must only
    be made on the main thread.
    """

    def __init__(self, spec: ChildSpec, process_group: int, output: ChildOutput) -> None:
        """Start it. `process_group` 0 makes it the leader of a new group; `output` gets what it prints.

        Raises:
            DeepInferError: the operating system refuses another process.
        """
        environment = {k: v for k, v in os.environ.items() if k not in NOT_INHERITED}
        environment |= QUIET_ENVIRONMENT | dict(spec.environment)
        if os.isatty(2):
            environment.setdefault(
                "TTY_COMPATIBLE", "1"
            )  # for progress bars, which go through a pipe
        try:
            with output.pipe() as printed:
                self._popen = subprocess.Popen(
                    python_command(spec.module),
                    stdin=subprocess.PIPE,
                    stdout=printed,
                    stderr=printed,
                    pass_fds=spec.pass_fds,
                    env=launch_environment(environment),
                    process_group=process_group,
                )
            self.pidfd = os.pidfd_open(self._popen.pid)
        except OSError as error:
            raise DeepInferError(
                f"Process {spec.name} cannot be started ({error.strerror}): {_advice(error)}."
            ) from error
        self.spec = spec
        self.pid = self._popen.pid
        self.process_group = process_group or self.pid
        self.started_at = time.monotonic()
        self._write_settings()

    def _write_settings(self) -> None:
        # Shorter than the pipe's buffer, so this never blocks.
        assert self._popen.stdin is not None
        # A child that died at once is noticed by its pidfd.
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.write(self.spec.settings + b"\n")
            self._popen.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def reap(self) -> int | None:
        """Exit code (negative: the signal that ended it), or None while it runs."""
        return self._popen.poll()

    def close(self) -> None:
        """Free the descriptors of a child that has been reaped. Idempotent."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
            assert self._popen.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._popen.stdin.close()


def _advice(error: OSError) -> str:
    if error.errno in (errno.EACCES, errno.ENOENT):
        return f"install {sys.executable} where this user may execute it"
    return "raise the limits on processes and open files (ulimit -u, ulimit -n)"


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
