"""The four mains end so that the daemon does right: started anew, unless a restart would not help."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from daemon.configuration.config import InstanceConfig
from daemon.instance.role_settings import MODULES, child_specs, make_plan
from frontend import run as frontend_run
from frontend.settings import FrontendSettings
from transport import process
from transport.child import EXIT_AGAIN, EXIT_FATAL, StopFlag
from transport.links.daemon import DaemonLink
from transport.messages.any import ANY_MESSAGE
from transport.messages.base import Hello, Refused, Welcome
from transport.sockets import Endpoints, RouterSocket

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "tests/data/v41_tiny"
SECONDS = 60.0


@pytest.fixture
def endpoints(tmp_path: Path) -> Endpoints:
    run_dir = tmp_path / "r"
    run_dir.mkdir()
    return Endpoints(str(run_dir))


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def settings_of(role: str, endpoints: Endpoints, listen_fd: int, connect_seconds: float) -> bytes:
    config = InstanceConfig(engine="fake")
    plan = make_plan(config, MODEL, Path(endpoints.run_dir), os.getpid())
    spec = next(spec for spec in child_specs(plan, listen_fd, []) if spec.role == role)
    values = msgspec.json.decode(spec.settings)
    values["process"]["connect_seconds"] = connect_seconds
    return msgspec.json.encode(values)


def exit_code(role: str, settings: bytes, listen_fd: int) -> tuple[int, str]:
    """Of the process once it has ended by itself, and its log."""
    process = subprocess.Popen(
        [sys.executable, "-m", MODULES[role]], cwd=ROOT, pass_fds=[listen_fd],
        stdin=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        process.stdin.write(settings + b"\n")
        process.stdin.flush()
        code = process.wait(SECONDS)
        return code, process.stderr.read().decode()
    finally:
        process.kill()
        process.communicate(timeout=SECONDS)


class Answering:
    """Answers every hello at one endpoint, until closed."""

    def __init__(self, context: zmq.Context, endpoint: str, answer: Welcome | Refused) -> None:
        self._socket = RouterSocket(context, endpoint, ANY_MESSAGE)
        self._answer = answer
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._socket.socket.poll(20)
            for received in self._socket.drain():
                if isinstance(received.message, Hello):
                    self._socket.send(received.peer, self._answer)

    def __enter__(self) -> Answering:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join(SECONDS)
        self._socket.socket.close(linger=0)


@pytest.mark.parametrize("role", list(MODULES))
def test_a_daemon_that_does_not_answer_is_no_reason_to_end_for_good(role, endpoints, listener):
    """It may stand still itself: then it must be able to start a new process once it goes on."""
    settings = settings_of(role, endpoints, listener.fileno(), connect_seconds=0.2)
    code, log = exit_code(role, settings, listener.fileno())
    assert "the daemon did not answer within 0.2 s" in log
    assert code == EXIT_AGAIN


@pytest.mark.parametrize("role", list(MODULES))
def test_a_refusal_is_final(role, endpoints, listener):
    context = zmq.Context()
    with Answering(context, endpoints.control, Refused("not one of mine")):
        settings = settings_of(role, endpoints, listener.fileno(), SECONDS)
        code, log = exit_code(role, settings, listener.fileno())
    context.destroy(linger=0)
    assert "the daemon refused this process: not one of mine" in log
    assert code == EXIT_FATAL


@pytest.mark.parametrize("role", [role for role in MODULES if role != "router"])
def test_a_refusal_by_the_router_is_final_too(role, endpoints, listener):
    context = zmq.Context()
    with (
        Answering(context, endpoints.control, Welcome()),
        Answering(context, endpoints.router, Refused("wrong")),
    ):
        settings = settings_of(role, endpoints, listener.fileno(), SECONDS)
        code, log = exit_code(role, settings, listener.fileno())
    context.destroy(linger=0)
    assert "the router refused this" in log
    assert code == EXIT_FATAL


@pytest.fixture
def frontend_main(monkeypatch, endpoints, listener):
    """frontend_main(**settings): its exit code and what the daemon was told, in this process."""

    def main(**changes: object) -> tuple[int, list[str]]:
        settings = msgspec.structs.replace(
            msgspec.json.decode(
                settings_of("frontend", endpoints, listener.fileno(), 0.2), type=FrontendSettings
            ),
            **changes,
        )
        told: list[str] = []
        monkeypatch.setattr(process, "enter_process", lambda _: (settings, StopFlag()))
        monkeypatch.setattr(DaemonLink, "start", lambda *_: None)
        monkeypatch.setattr(DaemonLink, "fatal", lambda _, reason: told.append(reason))
        return frontend_run.main(), told

    return main


def test_a_fault_of_a_running_frontend_does_not_end_it_for_good(monkeypatch, frontend_main, caplog):
    async def fault(*_: object) -> None:
        raise ValueError("a fault")

    monkeypatch.setattr(frontend_run, "_run", fault)
    code, told = frontend_main()
    assert (code, told) == (EXIT_AGAIN, [])
    assert "ValueError: a fault" in caplog.text
