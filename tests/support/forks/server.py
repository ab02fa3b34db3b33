"""The process that has imported what an instance needs, and forks: `python -m tests.support.forks.server`.

It has one thread, no CUDA, and nothing of any instance. A child gets its own descriptors, environment,
directory, session and signals before any code of the product runs. It does not take the interpreter apart
at its end: with all that is imported here, that takes a second.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import setproctitle

Main = Callable[[], int | None]

IMPORTED = (
    "daemon.cli.main", "daemon.instance.run_instance", "daemon.router.run", "frontend.run",
    "frontend.tokenizer.run", "workers.run", "workers.engine.create", "workers.models.registry",
    "transformers.models.llama.modeling_llama", "tests.support.forks.command",
)  # fmt: skip
REQUEST_BYTES = 1 << 17
MAX_FDS = 64


def serve_forks(line: socket.socket) -> Main | None:
    """Fork for who is at the other end, until that one ends: then returns None. Returns in each child as
    well, with what it is to run."""
    while True:
        data, fds, _, _ = socket.recv_fds(line, REQUEST_BYTES, MAX_FDS)
        if not data:
            return None
        assert len(list(Path("/proc/self/task").iterdir())) == 1, (
            "other threads would be lost in a fork"
        )
        request = json.loads(data)
        told_pid, tells_pid = os.pipe()
        may_go, lets_go = os.pipe()
        middle = os.fork()
        if middle == 0:
            if os.fork() != 0:
                os._exit(0)
            # Who knows its number may signal it, and start others in its group.
            _join_group(request)
            _heed_signals()
            os.write(tells_pid, b"%d" % os.getpid())
            os.close(lets_go)
            os.read(may_go, 1)
            line.detach()
            return _become(request, fds)
        os.waitpid(middle, 0)
        # From here on its parent is who asked for it.
        os.close(tells_pid)
        pid = os.read(told_pid, 64)
        for fd in (told_pid, may_go, lets_go, *fds):
            os.close(fd)
        line.send(pid)


def _join_group(request: dict) -> None:
    if request["new_session"]:
        os.setsid()
    if request["process_group"] is not None:
        os.setpgid(0, request["process_group"])


def _become(request: dict, fds: list[int]) -> Main:
    _take_fds(dict(zip(request["targets"], fds, strict=True)))
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = [request["module"], *request["arguments"]]
    if "PYTHONUNBUFFERED" in os.environ:
        sys.stdout.reconfigure(write_through=True)
    if "OMP_NUM_THREADS" in os.environ:  # which OpenMP has read before
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return importlib.import_module(request["module"]).main


def _take_fds(wanted: dict[int, int]) -> None:
    """Have these descriptors, by number, and no others."""
    above = max(wanted) + 1
    copies = {target: fcntl.fcntl(fd, fcntl.F_DUPFD, above) for target, fd in wanted.items()}
    for target, copy in copies.items():
        os.dup2(copy, target)
    for fd in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if fd not in wanted:
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(fd)


def ignore_signals() -> None:
    """Those of a terminal or a group are meant for the others."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _heed_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> None:
    ignore_signals()
    for module in IMPORTED:
        importlib.import_module(module)
    setproctitle.getproctitle()  # finds its place while there is the environment that lies beside it
    # The collector would write to, and so copy, what forks share.
    gc.collect()
    gc.freeze()
    work = serve_forks(socket.socket(fileno=int(sys.argv[1])))
    if work is not None:
        _leave(work)


def _leave(work: Main) -> None:
    """As `sys.exit(main())`, up to what is registered for the end."""
    try:
        code = work()
    except SystemExit as end:
        code = end.code
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    main()
