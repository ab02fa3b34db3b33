"""Servers that a benchmark starts and ends."""

from __future__ import annotations

import contextlib
import re
import shutil
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

import msgspec
import psutil

from daemon.inspection_client import InspectionClient

START_SECONDS = 120.0


@dataclass
class Served:
    """A running server: where it listens, its log, and its processes by name."""

    port: int
    log: Path
    processes: dict[str, psutil.Process]

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time used so far, per process."""
        return {name: sum(process.cpu_times()[:2]) for name, process in self.processes.items()}

    def engine_waits(self) -> dict[str, float]:
        """Seconds from a rank's choice to its first chunk being done, by request id (access log)."""
        pattern = re.compile(r" id=(\S+) .* queue=([\d.]+)ms")
        return {m[1]: float(m[2]) / 1000 for m in pattern.finditer(self.log.read_text())}


@contextlib.contextmanager
def instance(**options: object) -> Iterator[Served]:
    """`deepinfer serve --engine fake` with these options, in a run directory of its own."""
    folder = Path(tempfile.mkdtemp(prefix="di-bench-"))
    words = [word for k, v in options.items() for word in ("--" + k.replace("_", "-"), str(v))]
    port = free_port()
    command = [sys.executable, "-m", "daemon.cli.main", "serve", "--engine", "fake", "--instance",
               "bench", "--run-dir", str(folder / "run"), "--port", str(port), *words]  # fmt: skip
    log = folder / "log"
    with log.open("wb") as log_file:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log_file)
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
def naive_server() -> Iterator[Served]:
    """The baseline of `benchmarks/naive_stream.py`."""
    folder = Path(tempfile.mkdtemp(prefix="di-bench-"))
    port = free_port()
    log = folder / "log"
    with log.open("wb") as log_file:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.naive_stream", str(port)], stderr=log_file
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/", process, log)
        yield Served(port, log, {"frontend/0": psutil.Process(process.pid)})
    finally:
        process.terminate()
        process.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until `url` answers anything but 503."""
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
