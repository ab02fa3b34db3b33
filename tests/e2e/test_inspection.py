"""A look into running processes, through the real command line, also while some of them hang."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.waiting import eventually


@pytest.fixture(scope="module")
def server(serve):
    """No model: a token every 5 ms."""
    # Long enough for what these tests do with stopped processes.
    with serve(engine="fake", fake_step_ms=5, hang_seconds=120) as server:
        yield server.ready()


@pytest.fixture
def inspect(cli, server):
    """inspect("stacks", "router"): the finished command."""
    return lambda *words: cli(
        "inspect", *words, "--instance", server.instance, "--run-dir", server.run_dir
    )


@pytest.fixture
def every(inspect):
    """every("stacks"): the finished command, when all have answered it. One that does not within two
    seconds is named and fails the command; on a busy machine that may happen, and one asks again."""

    def run(*words: str):
        return eventually(lambda: answered(inspect(*words)), 120, f"all answer {words}")

    def answered(done):
        assert done.returncode == 0 or "did not answer" in done.stdout + done.stderr, done
        return done if done.returncode == 0 else None

    return run


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


def test_sockets_of_every_process(server):
    wanted = {(name, socket) for name in server.pids() for socket in ("control", "telemetry")}
    wanted |= {(name, "router") for name in server.pids() if name != "daemon"}
    wanted.add(("router", "tap"))

    def found() -> set[tuple[str, str]]:
        return {(row["process"], row["socket"]) for row in server.ask("sockets")}

    # A process that has just become ready has not sent a snapshot yet.
    eventually(lambda: found() == wanted, 60, "every socket is told")


def test_stacks_of_every_process(server, every):
    done = every("stacks", "--json")
    reports = {report["process"]: report for report in json.loads(done.stdout)}
    assert set(reports) == set(server.pids())
    for name, pid in server.pids().items():
        threads = {thread["name"]: thread for thread in reports[name]["threads"]}
        assert reports[name]["pid"] == pid
        assert "MainThread" in threads
        assert name == "daemon" or "daemon-link" in threads


def test_stacks_show_the_line_of_the_main_loop(every):
    done = every("stacks", "worker/0")
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


def test_the_log_level_changes_while_it_runs(server, inspect, every):
    done = every("log-level", "debug", "--json")
    reports = json.loads(done.stdout)
    assert {report["process"] for report in reports} == set(server.pids())
    assert {report["log_level"] for report in reports} == {"debug"}
    said = {line.split()[3] for line in server.log.splitlines() if "the log level is debug" in line}
    assert said == set(server.pids())
    done = every("log-level", "error", "router")
    assert done.stdout.split()[-2:] == ["router", "error"]
    every("log-level", "info")
    assert inspect("log-level", "loud").returncode == 2


@pytest.fixture
def tap_while(server, inspect):
    """tap_while(work, "--count", 5): the finished tap, and what `work()`, done meanwhile, gave."""

    def taps() -> int:
        rows = server.ask("sockets")
        return sum(row["received_messages"] for row in rows if row["socket"] == "tap")

    def run(work, *words):
        # A tap comes and goes: an odd number would be one whose going is still to be reported.
        eventually(lambda: taps() % 2 == 0, 60, "the last tap is over")
        before = taps()
        tap = pool.submit(inspect, "tap", *words)
        eventually(lambda: taps() > before, 60, "the router has noticed the tap")
        working = pool.submit(work)
        done = tap.result()
        assert done.returncode == 0, done.stderr
        return done.stdout, working

    with ThreadPoolExecutor(2) as pool:
        yield run


def completion(server):
    return server.post("/v1/completions", {"prompt": "tell nobody", "max_tokens": 8, "seed": 1})


def test_tap_shows_the_way_of_a_request_without_its_text(server, tap_while):
    out, reply = tap_while(lambda: completion(server), "--count", 6, "--json")
    assert reply.result().status == 200
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["message"], row["sender"], row["receiver"]) for row in rows] == [
        ("Submit", "frontend/0", "router"),
        ("Encode", "router", "tokenizer/0"),
        ("Encoded", "tokenizer/0", "router"),
        ("Start", "router", "worker/0"),
        ("TokenBatch", "worker/0", "router"),
        ("TokenBatch", "router", "frontend/0"),
    ]
    assert len({request for row in rows for request in row["request_ids"]}) == 1
    assert rows[0]["payload_bytes"] == len("tell nobody")
    assert "tell nobody" not in out
    assert [row["lost"] for row in rows] == [0] * 6


def test_tap_with_bodies_shows_texts_and_tokens(server, tap_while):
    words = ("--bodies", "--process", "frontend/0", "--count", 10, "--json")
    out, _ = tap_while(lambda: completion(server), *words)
    submit, *batches, finished = map(json.loads, out.splitlines())
    assert finished["message"] == "Finished"
    assert submit["payload"] == ["tell nobody"]
    assert submit["header"]["generate"]["sampling"]["max_tokens"] == 8
    assert {batch["message"] for batch in batches} == {"TokenBatch"}
    assert [len(batch["payload"][0].split()) for batch in batches] == [1] * 8


def test_tap_works_while_a_worker_hangs_and_its_lines_are_readable(server, tap_while, frozen):
    pid = frozen("worker/0")
    out, reply = tap_while(lambda: completion(server), "--count", 4)
    os.kill(pid, signal.SIGCONT)
    lines = out.splitlines()
    assert "frontend/0 → router" in lines[0]
    assert "Start" in lines[3]
    assert reply.result().status == 200


def test_queues_of_all_roles_are_shown_with_the_most_they_held(server, inspect):
    assert completion(server).status == 200

    def queues() -> dict[tuple[str, str], dict]:
        done = inspect("queues", "--json")
        assert done.returncode == 0, done.stderr
        return {(row["process"], row["queue"]): row for row in json.loads(done.stdout)}

    def settled() -> bool:
        found = queues()
        wanted = [
            ("router", "prompts at tokenizer/0"), ("router", "choices at worker/0"),
            ("worker/0", "sequences with a slot"), ("frontend/0", "unread stream bytes"),
        ]  # fmt: skip
        assert ("worker/0", "waiting sequences") in found
        busy = [key for key in wanted[:3] if found[key]["high_water"] < 1]
        return not busy and all(found[key]["depth"] == 0 for key in wanted)

    eventually(settled, 60, "all has been counted and is over")
