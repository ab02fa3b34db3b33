"""Instances run through the real command line, and what they must leave behind: nothing."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.process_session import session_members
from benchmarks.tiny_model import make_tiny_model
from daemon.cli.check.event_stream import event_data
from daemon.errors import DeepInferError
from daemon.inspection.inspection_client import InspectionClient

ROOT = Path(__file__).parents[2]
READY_SECONDS = 150.0
STOP_SECONDS = 60.0
HTTP_SECONDS = 60.0
COMMAND_SECONDS = 120.0
DAEMON_SECONDS = 30.0
"""Deadlines, all of them far beyond what is needed: a machine may be busy, or stand still for a while."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Instances run one test after the other, beside the tests that start none: mostly they wait."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.xdist_group("instances"))


def eventually(check: Callable[[], object], seconds: float, what: str) -> object:
    """The first true answer of `check`; fails the test after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        answer = check()
        if answer:
            return answer
        if time.monotonic() > deadline:
            pytest.fail(f"after {seconds:g} s still not: {what}")
        time.sleep(0.02)


def environment(changes: Mapping[str, str] = {}) -> dict[str, str]:
    """Ours without any option of an instance, so that tests do not depend on who runs them."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("DEEPINFER_")}
    return {
        **inherited,
        "DEEPINFER_ACCELERATOR": "cpu",
        "OMP_WAIT_POLICY": "PASSIVE",
        "COLUMNS": "200",
        **changes,
    }


def command_line(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "daemon.cli.main", *map(str, arguments)]


def flags(options: Mapping[str, object]) -> list[str]:
    """max_num_seqs=4 -> --max-num-seqs 4; deterministic=True -> --deterministic"""
    words = []
    for name, value in options.items():
        words.append("--" + name.replace("_", "-"))
        words += [] if value is True else [str(value)]
    return words


@dataclass
class Reply:
    """An HTTP answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> dict:
        return json.loads(self.body)


class Stream:
    """A streamed answer being read."""

    def __init__(self, connection: http.client.HTTPConnection, response) -> None:
        self.connection = connection
        self.status = response.status
        self._response = response

    def events(self) -> Iterator[dict]:
        """Events until [DONE], which must come."""
        return map(json.loads, event_data(self._response))

    def pieces(self) -> Iterator[str]:
        """Text pieces of a one-choice answer."""
        for event in self.events():
            assert "error" not in event, event
            for choice in event["choices"]:
                delta = choice.get("delta")
                yield (choice["text"] if delta is None else delta.get("content")) or ""

    def hang_up(self) -> None:
        self.connection.close()
        self._response.close()


class Server:
    """One `deepinfer serve` in a session of its own."""

    def __init__(self, folder: Path, model: Path, options: Mapping[str, object]) -> None:
        self.folder = folder
        self.log_path = folder / "log"
        options = {
            "instance": f"t{secrets.token_hex(4)}",
            "run_dir": folder / "run",
            "model": model,
            "port": 0,
            "heartbeat_seconds": 0.1,
            **options,
        }
        self.instance = str(options["instance"])
        self.run_dir = Path(str(options["run_dir"]))
        self.arguments = flags(options)
        self.url = ""
        self.exit_code: int | None = None
        with self.log_path.open("wb") as log, (folder / "out").open("wb") as out:
            self.process = subprocess.Popen(
                command_line("serve", *self.arguments),
                stdin=subprocess.DEVNULL, stdout=out, stderr=log, cwd=ROOT, env=environment(),
                start_new_session=True,
            )  # fmt: skip

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def output(self) -> str:
        return (self.folder / "out").read_text(errors="replace")

    def ask(self, what: str, timeout: float = DAEMON_SECONDS) -> dict:
        return json.loads(self._ask(what, timeout))

    def _ask(self, what: str, timeout: float) -> bytes:
        with InspectionClient(self.run_dir, self.instance) as client:
            return client.ask(what, timeout)

    def listening(self) -> Server:
        """Wait until there is a port, ready or not."""
        eventually(self._find_url, READY_SECONDS, "the daemon answers")
        return self

    def ready(self) -> Server:
        """Wait until it serves."""
        self.listening()
        eventually(self._is_ready, READY_SECONDS, "the instance is ready")
        return self

    def _find_url(self) -> bool:
        assert self.process.poll() is None, f"serve has ended:\n{self.log[-3000:]}"
        try:
            self.url = self.ask("status", 1.0)["url"]
        except DeepInferError:
            return False
        return True

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, f"serve has ended:\n{self.log[-3000:]}"
        return self.ask("status")["state"] == "ready" and self.get("/ready").status == 200

    def state(self) -> dict:
        return self.ask("state")

    def pids(self) -> dict[str, int]:
        return {row["name"]: row["pid"] for row in self.ask("processes")}

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of a metric, by its exposed name without the prefix; 0: none yet."""
        families = text_string_to_metric_families(self._ask("metrics", DAEMON_SECONDS).decode())
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == f"deepinfer:{name}" and labels.items() <= sample.labels.items()
        )

    # ---- HTTP ---------------------------------------------------------------------------------

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def get(self, path: str, headers: Mapping[str, str] = {}) -> Reply:
        return self._exchange("GET", path, None, headers)

    def post(self, path: str, body: object, headers: Mapping[str, str] = {}) -> Reply:
        return self._exchange("POST", path, json.dumps(body), headers)

    def _exchange(self, method: str, path: str, body: str | None, headers) -> Reply:
        connection = http.client.HTTPConnection(*self.address, timeout=HTTP_SECONDS)
        with contextlib.closing(connection):
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            return Reply(response.status, response.headers, response.read())

    @contextlib.contextmanager
    def stream(self, path: str, body: dict) -> Iterator[Stream]:
        connection = http.client.HTTPConnection(*self.address, timeout=HTTP_SECONDS)
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps({**body, "stream": True}))
            response = connection.getresponse()
            stream = Stream(connection, response)
            assert response.status == 200, response.read()
            yield stream

    # ---- the end ------------------------------------------------------------------------------

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """Exit code, once it has ended."""
        self.exit_code = self.process.wait(STOP_SECONDS)
        return self.exit_code

    def nothing_left(self) -> None:
        """No process, no file, no port."""
        assert session_members(self.process.pid) == {}
        assert not self.run_dir.exists(), sorted(self.run_dir.iterdir())
        if self.url:
            with socket.socket() as taken:
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                taken.bind(self.address)

    def end(self) -> None:
        """SIGTERM must end it well, unless the test has ended it."""
        if self.exit_code is None:
            self.signal(signal.SIGTERM)
            assert self.wait() == 0, self.log[-3000:]
        self.nothing_left()

    def destroy(self) -> None:
        """Whatever happened."""
        for pid in session_members(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(STOP_SECONDS)


@contextlib.contextmanager
def run_server(model: Path, **options: object) -> Iterator[Server]:
    # Not pytest's own folder: the path of a socket may have 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="di-", dir="/tmp"))
    server = Server(folder, model, options)
    try:
        yield server
        server.end()
    except BaseException:
        print(f"---- end of the log of {server.instance}\n{server.log[-6000:]}")
        raise
    finally:
        server.destroy()
        shutil.rmtree(folder)


# ---- fixtures -----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose page of 128 tokens has 64 KiB, with a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("tiny") / "tiny-llama"
    folder.mkdir()
    make_tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def serve(tiny_dir: Path):
    """serve(model=tiny model, **options): context of a running `deepinfer serve`."""

    def open_server(model: Path | None = None, **options: object):
        return run_server(model or tiny_dir, **options)

    return open_server


@pytest.fixture(scope="session")
def tiny_server(serve) -> Iterator[Server]:
    """The tiny model, for tests of the protocol that do not disturb each other."""
    with serve() as server:
        yield server.ready()


@pytest.fixture(scope="session")
def chat_server(serve, smollm2_dir: Path) -> Iterator[Server]:
    """The default model."""
    with serve(smollm2_dir, dtype="float32") as server:
        yield server.ready()


@pytest.fixture(scope="session")
def fake_server(serve) -> Iterator[Server]:
    """No model: a token every 20 ms."""
    with serve(engine="fake", fake_step_ms=20, max_waiting=2, max_num_seqs=2) as server:
        yield server.ready()


@pytest.fixture(scope="session")
def cli():
    """cli("status", "--json"): run a command to its end; `through` are words before it, such as env."""

    def run(
        *arguments: object,
        timeout: float = COMMAND_SECONDS,
        through: Sequence[str] = (),
        **variables: str,
    ):
        return subprocess.run(
            [*through, *command_line(*arguments)],
            cwd=ROOT, env=environment(variables), stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=timeout, check=False,
        )  # fmt: skip

    return run


@pytest.fixture(scope="session")
def within():
    """within(1.0): the deadline of what users are promised so soon. Held with TEST_TIMED=1, for a quiet
    machine; without it a busy one gets its time."""
    is_timed = os.environ.get("TEST_TIMED") == "1"
    return lambda seconds: seconds if is_timed else COMMAND_SECONDS


@pytest.fixture(scope="session")
def launch():
    """launch("start", …): a command that is running, with its output in pipes."""

    def run(*arguments: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command_line(*arguments),
            cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    return run


@pytest.fixture(scope="session", name="eventually")
def eventually_fixture() -> Callable[[Callable[[], object], float, str], object]:
    """eventually(check, seconds, what)"""
    return eventually


@pytest.fixture(scope="session", name="session_members")
def session_members_fixture() -> Callable[[int], dict[int, str]]:
    """session_members(leader)"""
    return session_members


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's name."""
    folder = Path(tempfile.mkdtemp(prefix="di-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)
