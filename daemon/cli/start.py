"""`deepinfer start`: run an instance in the background; returns when it serves."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO

from rich.console import Console

from daemon.cli.output import sentence_console, unfailing_output
from daemon.configuration.config import InstanceConfig
from daemon.configuration.sources import ignored_variables
from daemon.errors import EXIT_FAILED, DeepInferError
from daemon.system.listen import open_port_warning
from daemon.system.run_directory import (
    LOG_FILE,
    RunDirectory,
    already_running,
    choose_run_directory,
    make_run_directory,
    notify_path,
    running_pid,
)
from daemon.system.stop_signals import StopRequested, StopSignals
from transport.launch import launch_environment, python_command

LOG_TAIL_LINES = 15
POLL_SECONDS = 0.5
END_SECONDS = 30.0
"""How long a start that is given up may take to end."""
EARLIER_LOG_BYTES = 4 << 20
"""How much of the end of an earlier run's log is kept: more than anybody reads."""
ERROR_PREFIX = "deepinfer: "


@unfailing_output()
def start(config: InstanceConfig | None = None) -> None:
    """Start an instance in the background and wait until it serves.

    Its log goes to deepinfer.log in the run directory, and what is older to deepinfer.log.1. Fails
    with the log's tail if it ends first.
    Ctrl-C, SIGTERM and SIGHUP give the start up: what it has started ends too.
    """
    config = config or InstanceConfig()
    path = choose_run_directory(config.instance, config.run_dir)
    if running_pid(path) is not None:
        raise DeepInferError(already_running(path, config.instance))
    make_run_directory(path)
    console = sentence_console()
    for sentence in ignored_variables(os.environ):
        sentence_console(stderr=True).print(sentence, style="yellow")
    signals = StopSignals()
    earlier_log = b""
    try:
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify,
            (path / LOG_FILE).open("a+b") as log_file,
        ):
            notify.bind(str(notify_path(path)))
            earlier_log = _end_of(log_file)
            child = _start_and_wait(log_file, notify, path, config, console, signals)
    except StopRequested:
        raise KeyboardInterrupt from None
    finally:
        notify_path(path).unlink(missing_ok=True)
        _remove_if_nobody_runs(path, config.instance)
        _put_back(path, earlier_log)
        signals.close()
    warning = open_port_warning(config.host, config.api_keys_file is not None)
    if warning is not None:
        sentence_console(stderr=True).print(warning, style="yellow", markup=False)
    console.print(
        f"Instance {config.instance!r} is ready (process {child.pid}, log {path / LOG_FILE})."
    )


def _start_and_wait(
    log_file: BinaryIO,
    notify: socket.socket,
    path: Path,
    config: InstanceConfig,
    console: Console,
    signals: StopSignals,
) -> subprocess.Popen[bytes]:
    log_start = log_file.tell()
    child = _spawn(log_file, path)
    try:
        # Outside of this block signals only count: nothing may interrupt the start and the end of
        # the child.
        with signals.interrupting():
            _wait_until_ready(child, notify, config, console)
    except BaseException:
        # Too late, or given up: what was started here must not go on behind the user's back.
        child.terminate()
        _end(child)
        raise
    if child.returncode is not None:
        # It may have been emptied meanwhile, for its size.
        log_file.seek(log_start if log_start <= os.fstat(log_file.fileno()).st_size else 0)
        code = child.returncode if child.returncode > 0 else EXIT_FAILED
        raise DeepInferError(_failure(log_file.read(), code), code)
    return child


def _end(child: subprocess.Popen[bytes]) -> None:
    try:
        child.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait(END_SECONDS)


def _remove_if_nobody_runs(path: Path, instance: str) -> None:
    """A start that failed early leaves a log and an empty directory; taking the lock and closing it
    cleans up."""
    if path.is_dir() and running_pid(path) is None:
        with contextlib.suppress(DeepInferError):
            RunDirectory.lock(path, instance).close()


def _end_of(log_file: BinaryIO) -> bytes:
    """What an earlier run left in the log. Leaves the position at the end."""
    log_file.seek(max(0, log_file.tell() - EARLIER_LOG_BYTES))
    return log_file.read()


def _put_back(path: Path, earlier_log: bytes) -> None:
    """Restore an earlier run's log after a failed start: it may still say why that run ended."""
    if earlier_log and running_pid(path) is None and not (path / LOG_FILE).exists():
        make_run_directory(path)
        (path / LOG_FILE).write_bytes(earlier_log)


def _spawn(log_file: BinaryIO, path: Path) -> subprocess.Popen[bytes]:
    arguments = serve_arguments(sys.argv[1:])
    return subprocess.Popen(
        python_command("daemon.cli.main", *arguments),
        stdin=subprocess.DEVNULL,
        stdout=log_file,
        stderr=log_file,
        start_new_session=True,
        env=launch_environment(
            {**os.environ, "NOTIFY_SOCKET": str(notify_path(path)), "DEEPINFER_QUIET_START": "1"}
        ),
    )


def serve_arguments(words: list[str]) -> list[str]:
    """The arguments of the `serve` that does what `start` was told with `words`. The command comes
    before its options, so the first `start` is the command; a later one is somebody's value."""
    at = words.index("start")
    return [*words[:at], "serve", *words[at + 1 :]]


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
                raise DeepInferError(
                    f"The instance was not ready after {config.start_timeout:g} s: "
                    "raise --start-timeout."
                )


def _failure(log: bytes, code: int) -> str:
    lines = log.decode(errors="replace").rstrip().splitlines()
    reason = f"exit code {code}"
    if lines and lines[-1].startswith(ERROR_PREFIX):
        reason = lines.pop().removeprefix(ERROR_PREFIX)
    message = f"The instance could not start: {reason}"
    if lines:
        message += "\nThe end of its log:\n" + "\n".join(lines[-LOG_TAIL_LINES:])
    return message
