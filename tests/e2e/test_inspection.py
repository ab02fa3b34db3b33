"""A look into running processes, through the real command line, also while some of them hang."""

from __future__ import annotations

import json
import os
import signal

import pytest


@pytest.fixture(scope="module")
def server(serve):
    """No model: a token every 5 ms."""
    with serve(engine="fake", fake_step_ms=5) as server:
        yield server.ready()


@pytest.fixture
def inspect(cli, server):
    """inspect("stacks", "router"): the finished command."""
    return lambda *words: cli(
        "inspect", *words, "--instance", server.instance, "--run-dir", server.run_dir
    )


@pytest.fixture
def frozen(server):
    """frozen("worker/0"): stop it until the end of the test; returns its pid."""
    stopped = []

    def freeze(name: str) -> int:
        pid = server.pids()[name]
        os.kill(pid, signal.SIGSTOP)
        stopped.append(pid)
        return pid

    yield freeze
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)


def test_stacks_of_every_process(server, inspect):
    done = inspect("stacks", "--json")
    assert done.returncode == 0, done.stderr
    reports = {report["process"]: report for report in json.loads(done.stdout)}
    assert set(reports) == set(server.pids())
    for name, pid in server.pids().items():
        threads = {thread["name"]: thread for thread in reports[name]["threads"]}
        assert reports[name]["pid"] == pid
        assert "MainThread" in threads
        assert name == "daemon" or "daemon-link" in threads


def test_stacks_show_the_line_of_the_main_loop(inspect):
    done = inspect("stacks", "worker/0")
    assert done.returncode == 0
    assert "MainThread" in done.stdout
    assert "workers/worker.py:" in done.stdout
    assert "router" not in done.stdout.split()


def test_a_frozen_process_is_named_and_the_others_answer(inspect, frozen):
    pid = frozen("worker/0")
    done = inspect("stacks")
    assert done.returncode == 1
    assert f"kill -CONT {pid}" in done.stdout
    assert "worker/0" in done.stderr
    assert "daemon/router/run.py" in done.stdout


def test_an_unknown_process_is_told_with_those_there_are(inspect):
    done = inspect("stacks", "worker/7")
    assert done.returncode == 1
    assert "worker/0" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_log_level_changes_while_it_runs(server, inspect):
    done = inspect("log-level", "debug", "--json")
    assert done.returncode == 0, done.stderr
    assert {r["process"] for r in json.loads(done.stdout)} == set(server.pids())
    assert server.log.count("the log level is debug") == len(server.pids())
    done = inspect("log-level", "error", "router")
    assert (done.returncode, done.stdout.split()[-2:]) == (0, ["router", "error"])
    inspect("log-level", "info")
    assert inspect("log-level", "loud").returncode == 2
