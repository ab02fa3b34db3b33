"""`deepinfer start`: run an instance in the background; returns when it serves."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO

from rich.console import Console

from daemon.config import InstanceConfig
from daemon.errors import DeepInferError
from daemon.run_directory import (
    LOG_FILE,
    already_running,
    choose_run_directory,
    make_run_directory,
    running_pid,
)

LOG_TAIL_LINES = 15
POLL_SECONDS = 0.5


def start(config: InstanceConfig | None = None) -> None:
    """Start an instance in the background and wait until it serves.

    Its log goes to deepinfer.log in the run directory. Fails with the log's tail if it ends first.
    """
    config = config or InstanceConfig()
    path = choose_run_directory(config.instance, config.run_dir)
    pid = running_pid(path)
    if pid is not None:
        raise DeepInferError(already_running(config.instance, pid))
    make_run_directory(path)
    console = Console(highlight=False, soft_wrap=True)
    notify_path = path / "notify.sock"
    notify_path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(notify_path))
        try:
            with (path / LOG_FILE).open("w+b") as log_file:
                child = _spawn(log_file, notify_path)
                _wait_until_ready(child, notify, config, console)
                if child.returncode is not None:
                    raise DeepInferError(_failure(log_file, child.returncode))
            console.print(
                f"Instance {config.instance!r} is ready "
                f"(process {child.pid}, log {path / LOG_FILE})."
            )
        finally:
            notify_path.unlink(missing_ok=True)


def _spawn(log_file: BinaryIO, notify_path: Path) -> subprocess.Popen[bytes]:
    """The same command line with `serve` in the place of `start`, away from this terminal."""
    arguments = ["serve" if word == "start" else word for word in sys.argv[1:2]] + sys.argv[2:]
    return subprocess.Popen(
        [sys.executable, "-m", "daemon.cli.main", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=log_file,
        stderr=log_file,
        start_new_session=True,
        env={**os.environ, "NOTIFY_SOCKET": str(notify_path), "DEEPINFER_QUIET_START": "1"},
    )


def _wait_until_ready(
    child: subprocess.Popen[bytes],
    notify: socket.socket,
    config: InstanceConfig,
    console: Console,
) -> None:
    deadline = time.monotonic() + config.start_timeout
    poller = select.poll()
    poller.register(notify, select.POLLIN)
    with console.status("starting the processes") as spinner:
        while child.poll() is None:
            if poller.poll(POLL_SECONDS * 1000):
                fields = dict(
                    line.split("=", 1) for line in notify.recv(8192).decode().splitlines()
                )
                if "STATUS" in fields:
                    spinner.update(fields["STATUS"])
                if fields.get("READY") == "1":
                    break
            if time.monotonic() > deadline:
                child.terminate()
                raise DeepInferError(
                    f"The instance was not ready after {config.start_timeout:g} s: "
                    "raise --start-timeout."
                )


def _failure(log_file: BinaryIO, code: int) -> str:
    # Read through our own descriptor: the instance has removed the file with its run directory.
    log_file.seek(0)
    lines = log_file.read().decode(errors="replace").rstrip().splitlines()
    tail = "\n".join(lines[-LOG_TAIL_LINES:])
    return f"The instance could not start (exit code {code}). The end of its log:\n{tail}"
