"""Servers that a benchmark starts and ends."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import cyclopts
import msgspec
import psutil

from daemon.inspection.inspection_client import InspectionClient

START_SECONDS = 120.0

ServeOptions = Annotated[str, cyclopts.Parameter(allow_leading_hyphen=True)]
"""Further options of `deepinfer serve`, in one word."""


@dataclass
class Served:
    """A running server: where it listens, its log, and its processes by name."""

    port: int
    log: Path
    processes: dict[str, psutil.Process]

    def cpu_seconds(self) -> dict[str, float]:
        return {name: sum(process.cpu_times()[:2]) for name, process in self.processes.items()}

    def times_at_rank(self) -> dict[str, float]:
        """Seconds from the router's choice of a rank to its sight of the first token, by request id
        (access log): the engine, two hops, and the worker's own work."""
        pattern = re.compile(r" id=(\S+) .* queue=([\d.]+)ms")
        return {m[1]: float(m[2]) / 1000 for m in pattern.finditer(self.log.read_text())}


def start_daemon(folder: Path, port: int, **options: object) -> subprocess.Popen[bytes]:
    """`deepinfer serve` as instance `bench` in a session of its own, its run directory and log in
    `folder`. Not ready yet; the caller ends it."""
    words = []
    for name, value in options.items():
        words.append("--" + name.replace("_", "-"))
        if value is not True:  # a flag stands alone
            words.append(str(value))
    command = [sys.executable, "-m", "daemon.cli.main", "serve", "--instance", "bench",
               "--run-dir", str(folder / "run"), "--port", str(port), *words]  # fmt: skip
    with (folder / "log").open("wb") as log_file:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log_file,
            start_new_session=True,
        )  # fmt: skip


def end_daemon(daemon: subprocess.Popen[bytes]) -> dict[str, int]:
    """Stop it as a user would; returns what is wrong with its end."""
    daemon.terminate()
    try:
        code = daemon.wait(60)
    except subprocess.TimeoutExpired:
        return {"the daemon had not ended after 60 s": 1}
    return {f"exit code {code} of the daemon": 1} if code else {}


@contextlib.contextmanager
def started(
    folder: Path, port: int, options: dict[str, object]
) -> Iterator[subprocess.Popen[bytes]]:
    """A ready instance; whatever happens, nothing of it runs afterwards."""
    daemon = start_daemon(folder, port, **options)
    try:
        wait_for(f"http://127.0.0.1:{port}/ready", daemon, folder / "log")
        yield daemon
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(daemon.pid, signal.SIGKILL)
        daemon.wait(60)


def served_options(words: str) -> dict[str, object]:
    """`--dp 2 --deterministic` as keywords for `instance`.

    Raises:
        ValueError: a word is no option, or has a value too many.
    """
    options: dict[str, object] = {}
    for word in shlex.split(words):
        if word.startswith("--"):
            name, has_value, value = word[2:].replace("-", "_").partition("=")
            options[name] = value if has_value else True
            last = name
        elif options and options[last] is True:
            options[last] = word
        else:
            raise ValueError(f"--serve: {word!r} belongs to no option: write --NAME VALUE")
    return options


@contextlib.contextmanager
def instance(**options: object) -> Iterator[Served]:
    """`deepinfer serve` with these options, by default with the fake engine, in a run directory of its
    own."""
    folder = Path(tempfile.mkdtemp(prefix="di-bench-"))
    port = free_port()
    log = folder / "log"
    process = start_daemon(folder, port, **{"engine": "fake", **options})
    try:
        wait_for(f"http://127.0.0.1:{port}/ready", process, log)
        with InspectionClient(folder / "run", "bench") as client:
            rows = msgspec.json.decode(client.ask("processes", 5.0))
        yield Served(port, log, {row["name"]: psutil.Process(row["pid"]) for row in rows})
    finally:
        process.terminate()
        process.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def baseline(module: str, *arguments: str) -> Iterator[Served]:
    """A server of this folder to compare with: `python -m MODULE PORT ARGUMENT ...`."""
    folder = Path(tempfile.mkdtemp(prefix="di-bench-"))
    port = free_port()
    log = folder / "log"
    with log.open("wb") as log_file:
        command = [sys.executable, "-m", module, str(port), *arguments]
        process = subprocess.Popen(command, stderr=log_file)
    try:
        wait_for(f"http://127.0.0.1:{port}/", process, log)
        yield Served(port, log, {"frontend/0": psutil.Process(process.pid)})
    finally:
        process.terminate()
        process.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server has ended:\n{log.read_text()[-2000:]}")
        try:
            urllib.request.urlopen(url, timeout=5)
            return
        except urllib.error.HTTPError as error:
            if error.code != 503:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise TimeoutError(f"{url} did not answer within {START_SECONDS:g} s")
