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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.process_session import session_members
from daemon.cli.check.event_stream import event_data
from daemon.errors import DeepInferError
from daemon.inspection.inspection_client import InspectionClient
from tests.support.forks.forker import ForkedProcess, Forker
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[2]
READY_SECONDS = 150.0
STOP_SECONDS = 60.0
HTTP_SECONDS = 60.0
COMMAND_SECONDS = 120.0
DAEMON_SECONDS = 30.0
"""Deadlines, all of them far beyond what is needed: a machine may be busy, or stand still for a while."""


JSON_TYPE = {"Content-Type": "application/json"}


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


def start_command(
    arguments: Sequence[object],
    stdout: IO[bytes],
    stderr: IO[bytes],
    forker: Forker | None,
    variables: Mapping[str, str] = {},
    through: Sequence[str] = (),
    new_session: bool = False,
) -> subprocess.Popen[bytes] | ForkedProcess:
    """A command that runs, as a fork if there is a forker."""
    if forker is not None:
        with open(os.devnull, "rb") as nothing:
            fds = {0: nothing.fileno(), 1: stdout.fileno(), 2: stderr.fileno()}
            return forker.start(
                "tests.support.forks.command", list(map(str, arguments)), fds,
                environment(variables), cwd=ROOT, new_session=new_session,
            )  # fmt: skip
    return subprocess.Popen(
        [*through, *command_line(*arguments)], cwd=ROOT, env=environment(variables),
        stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=new_session,
    )  # fmt: skip


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

    def __init__(
        self, folder: Path, model: Path, options: Mapping[str, object], forker: Forker | None
    ) -> None:
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
            self.process = start_command(
                ["serve", *self.arguments], out, log, forker, new_session=True
            )

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
            connection.request(method, path, body, JSON_TYPE | dict(headers))
            response = connection.getresponse()
            return Reply(response.status, response.headers, response.read())

    @contextlib.contextmanager
    def stream(self, path: str, body: dict) -> Iterator[Stream]:
        connection = http.client.HTTPConnection(*self.address, timeout=HTTP_SECONDS)
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps({**body, "stream": True}), JSON_TYPE)
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
def run_server(model: Path, forker: Forker | None, **options: object) -> Iterator[Server]:
    """Without a forker it is started as a user does."""
    # Not pytest's own folder: the path of a socket may have 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="di-", dir="/tmp"))
    server = Server(folder, model, options, forker)
    try:
        yield server
        server.end()
    except BaseException:
        print(f"---- end of the log of {server.instance}\n{server.log[-6000:]}")
        raise
    finally:
        server.destroy()
        shutil.rmtree(folder)
