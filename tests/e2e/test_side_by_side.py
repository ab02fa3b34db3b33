"""Three instances whose names begin alike: whatever happens to one, the others do not notice."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.process_session import session_members
from tests.support.waiting import eventually

FAKE = {"engine": "fake", "fake_step_ms": 100}
BODY = {"prompt": "hello the", "max_tokens": 1900, "ignore_eos": True}
"""Streamed, it runs for longer than anything here takes."""
EXCUSED = re.compile(
    r" (degraded: (\S+/\d+|router): gives no sign of life"
    r"(; (\S+/\d+|router): gives no sign of life)*|the daemon itself stood still for [\d.]+ s)$"
)
"""What an instance says that a busy machine has kept waiting, whoever its neighbours are."""
OTHERS = ("b", "a-b")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def parent() -> Iterator[Path]:
    """The directory that holds all run directories, as under /run/deepinfer."""
    folder = Path(tempfile.mkdtemp(prefix="di-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def others(serve, parent):
    """Instances b and a-b."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(open_instance(serve, parent, name)) for name in OTHERS]
        yield [server.ready() for server in servers]


@pytest.fixture
def first(serve, parent, others):
    """Instance a, beside the others."""
    with open_instance(serve, parent, "a") as server:
        yield server.ready()


def open_instance(serve, parent: Path, name: str):
    return serve(instance=name, run_dir=parent / name, **FAKE)


def identity(server) -> dict[str, object]:
    """What must not change: processes, their restarts, files and sockets, the port."""
    status = server.ask("status")
    rows = server.ask("processes")
    files = {path.name: path.stat().st_ino for path in server.run_dir.iterdir()}
    return {
        "url": status["url"], "pid": status["pid"],
        "pids": {row["name"]: row["pid"] for row in rows},
        "restarts": {row["name"]: row["restarts"] for row in rows},
        "sockets": {name: inode for name, inode in files.items() if name.endswith(".sock")},
        "lock": files["lock"],
    }  # fmt: skip


def complaints(log: str) -> list[str]:
    """The warnings and errors of a log that a busy machine does not excuse."""
    lines = [line for line in log.splitlines() if re.search(r" (WARNING|ERROR|CRITICAL) ", line)]
    return [line for line in lines if not EXCUSED.search(line)]


@contextlib.contextmanager
def untouched(servers) -> Iterator[None]:
    """What happens within changes nothing of these, and interrupts no answer of theirs."""
    before = [identity(server) for server in servers]
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(s.stream("/v1/completions", BODY)) for s in servers]
        pieces = [stream.events() for stream in streams]
        for events in pieces:
            next(events)
        yield
        for server in servers:
            (row,) = server.ask("requests")
            deadline = time.monotonic() + 60
            while server.ask("requests")[0]["output_tokens"] <= row["output_tokens"]:
                assert time.monotonic() < deadline, "the stream has stopped"
            assert row["output_tokens"] < BODY["max_tokens"]
            assert server.post("/v1/completions", {**BODY, "max_tokens": 3}).status == 200
            server.ready()
    assert [identity(server) for server in servers] == before
    for server in servers:
        assert server.metric("admission_rejections_total") == 0
        assert complaints(server.log) == []


def command(server) -> tuple[object, ...]:
    return ("--instance", server.instance, "--run-dir", server.run_dir)


def test_all_of_them_are_told_apart(first, others):
    servers = [first, *others]
    assert [server.ask("status")["instance"] for server in servers] == ["a", *OTHERS]
    assert len({server.url for server in servers}) == 3
    pids = [pid for server in servers for pid in server.pids().values()]
    assert len(set(pids)) == len(pids)


def test_stop_and_start_of_one(serve, parent, others, cli):
    with untouched(others):
        for _ in range(2):
            with open_instance(serve, parent, "a") as server:
                server.ready()
                assert cli("stop", *command(server)).returncode == 0
                assert server.wait() == 0
            assert not (parent / "a").exists()


def test_a_failed_start_of_one(parent, others, cli, tiny_dir, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(tiny_dir, broken)
    (broken / "tokenizer.json").write_text('{"model": 5}')
    where = ("--instance", "a", "--run-dir", parent / "a", "--engine", "fake")
    with untouched(others):
        late = cli("serve", *where, "--model", broken, "--port", 0)
        taken = cli("serve", *where, "--model", tiny_dir, "--port", others[0].address[1])
    assert "tokenizer" in late.stderr.splitlines()[-1]
    assert "is already in use" in taken.stderr
    assert late.returncode > 0
    assert taken.returncode > 0
    assert not (parent / "a").exists()


def test_a_second_start_of_one(first, others, cli):
    with untouched([first, *others]):
        result = cli("serve", *first.arguments)
    assert "'a' is already running" in result.stderr


def test_the_daemon_of_one_is_killed_and_started_anew(serve, parent, others):
    with untouched(others), open_instance(serve, parent, "a") as killed:
        killed.ready()
        killed.signal(signal.SIGKILL)
        assert killed.wait() == -signal.SIGKILL
        with open_instance(serve, parent, "a") as again:
            again.ready()
            assert session_members(killed.process.pid) == {}
            assert again.post("/v1/completions", {**BODY, "max_tokens": 3}).status == 200


def test_losses_of_one(first, others):
    with untouched(others):
        before = first.pids()
        lost = {name: pid for name, pid in before.items() if pid != first.process.pid}
        for pid in lost.values():
            os.kill(pid, signal.SIGKILL)

        def replaced() -> bool:
            now = first.pids()
            return all(now[name] not in (None, pid) for name, pid in lost.items())

        eventually(replaced, 60, "all processes are replaced")
        first.ready()
