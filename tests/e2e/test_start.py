"""`deepinfer start` that is given up or killed, and what commands call an instance."""

from __future__ import annotations

import signal
import subprocess

import pytest

from benchmarks.process_session import session_members
from daemon.cli.start import serve_arguments
from daemon.system.run_directory import running_pid
from tests.support.waiting import eventually

FAKE = ("--engine", "fake", "--port", "0")


@pytest.fixture
def started(launch, short_dir, tiny_dir):
    """started(): a `start` under way, with the pid of its instance; ended whatever happens."""
    leaders: list[int] = []

    def run(*options: str) -> tuple[subprocess.Popen, int]:
        process = launch("start", "--run-dir", short_dir / "run", "--model", tiny_dir, *options)
        pid = eventually(lambda: running_pid(short_dir / "run"), 30, "the daemon runs")
        leaders.append(pid)
        return process, pid

    yield run
    for leader in leaders:
        for pid in session_members(leader):
            subprocess.run(["kill", "-9", str(pid)], check=False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_start_that_is_given_up_leaves_nothing(started, short_dir, number):
    process, pid = started("--port", "0")
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "is ready" not in output
    assert session_members(pid) == {}
    assert not (short_dir / "run").exists()


def test_a_start_that_fails_leaves_the_log_of_an_earlier_run(cli, short_dir):
    run_dir = short_dir / "run"
    run_dir.mkdir(mode=0o700)
    (run_dir / "deepinfer.log").write_text("why it ended\n")
    failed = cli("start", "--run-dir", run_dir, "--model", short_dir / "none", *FAKE)
    assert failed.returncode == 2, failed.stderr
    assert "why it ended" not in failed.stderr
    assert [entry.name for entry in run_dir.iterdir()] == ["deepinfer.log"]
    assert (run_dir / "deepinfer.log").read_text() == "why it ended\n"


def test_a_killed_start_does_not_keep_the_run_directory(started, cli, short_dir):
    process, _ = started(*FAKE)
    process.kill()
    process.wait(10)
    run_dir = short_dir / "run"
    assert list(run_dir.glob("n*.sock"))
    eventually(lambda: cli("status", "--run-dir", run_dir).returncode == 0, 60, "it serves")
    stopped = cli("stop", "--run-dir", run_dir)
    assert stopped.returncode == 0, stopped.stderr
    assert not run_dir.exists()


def test_a_start_that_was_stopped_meanwhile_hears_that_the_instance_is_ready(
    started, cli, short_dir
):
    process, _ = started(*FAKE)
    process.send_signal(signal.SIGSTOP)  # as a busy machine does, or Ctrl-Z
    here = ("--run-dir", short_dir / "run")
    eventually(lambda: cli("status", *here).returncode == 0, 120, "it serves")
    process.send_signal(signal.SIGCONT)
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, "is ready" in output) == (0, True), (output, errors)
    assert cli("stop", *here).returncode == 0


def test_commands_tell_the_instance_that_runs_in_the_directory(cli, tiny_dir, short_dir):
    run_dir = short_dir / "run"
    here = ("--run-dir", run_dir)
    start = ("start", "--instance", "blue", *here, "--model", tiny_dir, *FAKE)
    try:
        assert cli(*start).returncode == 0
        # On a busy machine it may be degraded for a moment.
        wanted = "ready  blue  tiny-llama"
        eventually(lambda: wanted in cli("status", *here).stdout, 60, "the status names it")
        again = cli("start", *here, "--model", tiny_dir, *FAKE).stderr
        assert "Instance 'blue' is already running" in again
        assert f"`deepinfer stop --instance blue --run-dir {run_dir}`" in again
    finally:
        stopped = cli("stop", *here)
    assert stopped.stdout == "Instance 'blue' has stopped.\n"
    down = cli("status", *here).stderr
    assert f"`deepinfer start --run-dir {run_dir}`" in down


def test_a_start_that_lets_strangers_in_says_so(cli, tiny_dir, short_dir):
    here = ("--run-dir", short_dir / "run")
    started = cli("start", *here, "--host", "0.0.0.0", "--model", tiny_dir, *FAKE)
    assert started.returncode == 0, started.stderr
    assert "It listens on 0.0.0.0 without API keys" in started.stderr
    assert cli("stop", *here).returncode == 0


def test_serve_gets_the_options_of_start():
    assert serve_arguments(["start", "--instance", "start"]) == ["serve", "--instance", "start"]
