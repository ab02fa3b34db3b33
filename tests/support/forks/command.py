"""The command line in a fork; the processes that it starts as a daemon are forks as well."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

from daemon.cli.main import main as run_command
from daemon.supervision import child_process
from tests.support.forks.forker import ForkedProcess, Forker
from tests.support.forks.server import ignore_signals, serve_forks
from transport.child import die_with_parent
from transport.launch import python_command


def main() -> int | None:
    """As of `deepinfer`."""
    if sys.argv[1:2] != ["serve"]:
        return run_command()
    # Before there is a thread, a socket or anything else of a daemon.
    daemon = os.getpid()
    line, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = os.fork()
    if server == 0:
        line.close()
        die_with_parent(daemon)
        ignore_signals()
        work = serve_forks(other)
        return 0 if work is None else work()
    other.close()
    forker = Forker(line)
    child_process.subprocess = SimpleNamespace(
        Popen=lambda *args, **options: _popen(forker, *args, **options), PIPE=subprocess.PIPE
    )
    try:
        return run_command()
    finally:
        forker.close()
        os.waitpid(server, 0)


def _popen(
    forker: Forker,
    line: Sequence[str],
    *,
    stdin: int,
    stdout: int,
    stderr: int,
    pass_fds: Sequence[int],
    env: Mapping[str, str],
    process_group: int,
) -> ForkedProcess:
    """What the supervisor asks of `subprocess.Popen`, and nothing else."""
    module = line[-1]
    assert (list(line), stdin) == (python_command(module), subprocess.PIPE)
    read_end, write_end = os.pipe()
    fds = {0: read_end, 1: stdout, 2: stderr, **{fd: fd for fd in pass_fds}}
    try:
        process = forker.start(module, [], fds, env, process_group=process_group)
    finally:
        os.close(read_end)
    process.stdin = os.fdopen(write_end, "wb")
    return process
