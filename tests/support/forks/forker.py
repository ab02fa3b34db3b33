"""Asks a process that forks for children of one's own."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

PR_SET_CHILD_SUBREAPER = 36
ROOT = Path(__file__).parents[3]
FORK_SECONDS = 60.0
_libc = ctypes.CDLL(None, use_errno=True)


class ForkedProcess:
    """A child that was forked by somebody else: what tests and the supervisor use of `subprocess.Popen`."""

    def __init__(self, pid: int, stdin: IO[bytes] | None = None) -> None:
        self.pid = pid
        self.stdin = stdin
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        if self.poll() is None:
            pidfd = os.pidfd_open(self.pid)
            try:
                poller = select.poll()
                poller.register(pidfd, select.POLLIN)
                poller.poll(timeout * 1000)
            finally:
                os.close(pidfd)
            if self.poll() is None:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Forker:
    """One end of the line to a process that runs `serve_forks`."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._line.settimeout(FORK_SECONDS)
        self._turn = threading.Lock()

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        fds: Mapping[int, int],
        environment: Mapping[str, str],
        cwd: Path | None = None,
        process_group: int | None = None,
        new_session: bool = False,
    ) -> ForkedProcess:
        """Run `main()` of a module in a child of this process.

        Args:
            fds: its descriptors, by number, and ours that they are copies of. It has no others.
            process_group: as of `subprocess.Popen`.
        """
        request = {
            "module": module, "arguments": list(arguments), "targets": list(fds),
            "environment": dict(environment), "cwd": str(cwd or Path.cwd()),
            "process_group": process_group, "new_session": new_session,
        }  # fmt: skip
        with self._turn, _adopting():
            socket.send_fds(self._line, [json.dumps(request).encode()], list(fds.values()))
            answer = self._line.recv(64)
        assert answer, "the process that forks has ended"
        return ForkedProcess(int(answer))

    def close(self) -> None:
        """Ends the process that forks, but none that it has forked."""
        self._line.close()


@contextmanager
def fork_server(environment: Mapping[str, str]) -> Iterator[Forker]:
    """A process that has imported what an instance needs, in a session of its own."""
    line, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.support.forks.server", str(other.fileno())]
    # Libraries read some of it as they are loaded; more than one thread cannot be forked.
    environment = {**environment, "HF_HUB_OFFLINE": "1", "OPENBLAS_NUM_THREADS": "1"}
    with line, subprocess.Popen(
        command, cwd=ROOT, env=environment, pass_fds=[other.fileno()], start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        other.close()
        forker = Forker(line)
        try:
            yield forker
        finally:
            forker.close()
            process.wait(FORK_SECONDS)


@contextmanager
def _adopting() -> Iterator[None]:
    """Within, a grandchild whose parent ends becomes our child."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
