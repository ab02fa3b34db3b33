"""Neither who reads what it prints nor where it was started decides whether an instance lives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from pathlib import Path

import psutil
import pytest

from benchmarks.process_session import session_members
from daemon.errors import DeepInferError
from daemon.inspection.inspection_client import InspectionClient
from tests.support.instance import (
    COMMAND_SECONDS,
    JSON_TYPE,
    ROOT,
    command_line,
    environment,
    flags,
)
from tests.support.waiting import eventually
from transport.launch import python_command

BODY = json.dumps({"prompt": "hello", "max_tokens": 1}).encode()
PIPE_LINES = 1000
"""More lines of the access log than a pipe holds."""


@pytest.fixture
def trap(short_dir: Path) -> Path:
    """A working directory with modules that must not be imported: each leaves a file `ran`."""
    folder = short_dir / "trap"
    folder.mkdir()
    for name in ("queue", "numpy", "zmq", "msgspec", "tokenizers"):
        (folder / f"{name}.py").write_text(f"open({str(short_dir / 'ran')!r}, 'w')\n")
    return folder


@pytest.fixture
def served(short_dir, tiny_dir, trap):
    """served(shell): a `serve` in the trap whose output goes where the words of a shell say; its
    process, url and, in the end, nothing left."""
    run_dir = short_dir / "run"
    options = {"run_dir": run_dir, "model": tiny_dir, "engine": "fake", "port": 0}
    processes: list[subprocess.Popen] = []

    def run(
        redirections: str, stdout: int | None = None, through: tuple[str, ...] = ()
    ) -> tuple[subprocess.Popen, str]:
        words = python_command("daemon.cli.main", "serve", *flags(options))
        process = subprocess.Popen(
            ["sh", "-c", f'exec "$@" {redirections}', "sh", *through, *words],
            cwd=trap, env=environment(), stdout=stdout, start_new_session=True,
        )  # fmt: skip
        processes.append(process)
        return process, eventually(lambda: url_of(run_dir), COMMAND_SECONDS, "it serves")

    yield run
    for process in processes:
        for pid in session_members(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait(COMMAND_SECONDS)
    assert not (short_dir / "ran").exists()


def url_of(run_dir: Path) -> str:
    """The instance's URL, once it serves."""
    try:
        with InspectionClient(run_dir, "default") as client:
            status = json.loads(client.ask("status", 5.0))
    except DeepInferError:
        return ""
    return status["url"] if status["state"] == "ready" else ""


def answers(url: str) -> bool:
    asked = urllib.request.Request(f"{url}/v1/completions", BODY, JSON_TYPE)
    with urllib.request.urlopen(asked, timeout=COMMAND_SECONDS) as reply:
        return reply.status == 200


def test_a_pipe_that_nobody_reads_holds_up_neither_service_nor_stop(served):
    ours, theirs = os.pipe()
    process, url = served("2>&1 <&-", theirs)
    os.close(theirs)
    for _ in range(PIPE_LINES):
        assert answers(url)
    process.send_signal(signal.SIGTERM)
    assert process.wait(COMMAND_SECONDS) == 0
    os.close(ours)


@pytest.mark.slow
@pytest.mark.parametrize("redirections", [">/dev/full 2>&1", ">&- 2>&-", "2>&1 | head -n 3"])
def test_output_that_goes_nowhere_ends_nothing(served, redirections):
    process, url = served(redirections)
    assert answers(url)
    if "|" not in redirections:
        process.send_signal(signal.SIGTERM)
        assert process.wait(COMMAND_SECONDS) == 0


@pytest.mark.slow
def test_it_may_be_the_first_process_of_a_container(served):
    own_numbers = ("unshare", "--pid", "--fork", "--mount-proc")
    if subprocess.run([*own_numbers, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no process numbers of our own")
    process, url = served("", through=own_numbers)
    assert answers(url)
    (first,) = psutil.Process(process.pid).children()
    first.terminate()
    assert process.wait(COMMAND_SECONDS) == 0


def test_a_log_is_bounded_and_may_be_taken_away(cli, short_dir, tiny_dir):
    run_dir = short_dir / "run"
    log, older = run_dir / "deepinfer.log", run_dir / "deepinfer.log.1"
    run_dir.mkdir(mode=0o700)
    log.write_text("an earlier run\n" * 50_000)
    options = {"run_dir": run_dir, "model": tiny_dir, "engine": "fake", "port": 0, "log_mb": 1}
    with open("/dev/full", "w") as full:
        started = subprocess.run(
            command_line("start", *flags(options)), cwd=ROOT, env=environment(),
            stdin=subprocess.DEVNULL, stdout=full, stderr=full, timeout=COMMAND_SECONDS, check=False,
        )  # fmt: skip
    try:
        assert started.returncode == 0
        assert older.read_text() == "an earlier run\n" * 50_000
        assert "an earlier run" not in log.read_text()
        log.unlink()
        url = url_of(run_dir)
        assert answers(url)
        eventually(lambda: log.exists() and "POST /v1/completions 200" in log.read_text())
    finally:
        stopped = cli("stop", "--run-dir", run_dir)
    assert stopped.returncode == 0, stopped.stderr
    assert not run_dir.exists()
