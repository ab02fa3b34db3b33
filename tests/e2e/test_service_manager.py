"""What a service manager is told, and when: the datagrams that `deepinfer serve` sends."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.waiting import eventually


class Manager:
    """The service manager's end of the socket."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self.lines: list[str] = []

    def receive(self, seconds: float) -> str | None:
        """The next datagram, if one comes."""
        self._socket.settimeout(seconds)
        try:
            line = self._socket.recv(8192).decode()
        except TimeoutError:
            return None
        self.lines.append(line)
        return line

    def wait_for(self, start: str, seconds: float) -> str:
        """The next datagram that begins with `start`."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            line = self.receive(left)
            if line is not None and line.startswith(start):
                return line
        pytest.fail(f"no {start} within {seconds:g} s; got {self.lines[-20:]}")

    def is_quiet(self, seconds: float) -> bool:
        """Whether no sign of life comes for so long."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self.receive(left) == "WATCHDOG=1":
                return False
        return True

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(monkeypatch) -> Iterator[Manager]:
    with tempfile.TemporaryDirectory(prefix="di-", dir="/tmp") as folder:
        path = Path(folder) / "notify"
        manager = Manager(path)
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        monkeypatch.setenv("WATCHDOG_USEC", "2000000")
        yield manager
        manager.close()


@pytest.mark.slow
def test_a_service_manager_is_told_the_truth(serve, manager):
    with serve(hang_seconds=120) as server:
        manager.wait_for("READY=1", 150)
        # From here on, and not before: no request may meet an instance that is not ready.
        server.url = server.ask("status")["url"]
        assert server.post("/v1/completions", {"prompt": "hello", "max_tokens": 1}).status == 200
        loading = manager.lines[: manager.lines.index("READY=1")]
        assert any(line.startswith("STATUS=starting: worker/0: ") for line in loading)
        asked = [int(line.split("=")[1]) for line in loading if line.startswith("EXTEND_TIMEOUT_")]
        assert len(asked) >= 3
        assert min(asked) >= 30_000_000
        assert f"STATUS=serving tiny-llama at {server.url}" in manager.lines

        for _ in range(5):
            manager.wait_for("WATCHDOG=1", 60)
        worker = server.pids()["worker/0"]
        os.kill(worker, signal.SIGSTOP)
        eventually(lambda: manager.is_quiet(2.0), 60, "the watchdog is no longer fed")
        assert any("worker/0: gives no sign of life" in line for line in manager.lines)
        os.kill(worker, signal.SIGCONT)
        manager.wait_for("WATCHDOG=1", 60)

        server.signal(signal.SIGTERM)
        manager.wait_for("STOPPING=1", 60)
        asked_to_stop = manager.wait_for("EXTEND_TIMEOUT_USEC=", 60)
        assert int(asked_to_stop.split("=")[1]) > 30_000_000 + 25_000_000
        assert server.wait() == 0
    assert manager.lines.count("READY=1") == 1


@pytest.mark.slow
def test_an_instance_that_cannot_start_is_never_ready(serve, manager, tiny_dir, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_dir.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    save_file({"strange": np.zeros(1, np.float32)}, broken / "model.safetensors")
    with serve(broken) as server:
        manager.wait_for("STOPPING=1", 150)
        assert server.wait() != 0
        while manager.receive(0.1) is not None:
            pass
        assert "READY=1" not in manager.lines
