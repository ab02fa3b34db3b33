"""Instances start, stop, fail and recover as their user was told."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from benchmarks.process_session import session_members
from tests.support.waiting import eventually

FAKE = {"engine": "fake", "fake_step_ms": 5}
SLOW = {"engine": "fake", "fake_step_ms": 60}
"""The answer to `LONG` takes longer than anything is waited for here."""
PROMPT = {"prompt": "hello the", "temperature": 0}
LONG = {**PROMPT, "max_tokens": 1500, "ignore_eos": True}


def answers(server) -> bool:
    reply = server.post("/v1/completions", {**PROMPT, "max_tokens": 3})
    return reply.status == 200 and reply.json["usage"]["completion_tokens"] == 3


def one_sentence(result) -> str:
    """The error of a command that must have failed with nothing but one sentence at its end."""
    assert result.returncode > 0, result.stdout
    assert "Traceback" not in result.stderr, result.stderr
    lines = [line for line in result.stderr.strip().splitlines() if line.startswith("deepinfer: ")]
    assert len(lines) == 1, result.stderr
    sentence = lines[0].removeprefix("deepinfer: ")
    assert sentence == result.stderr.strip().splitlines()[-1].removeprefix("deepinfer: ")
    names = ("worker/", "tokenizer/", "frontend/", "/")  # a process, or the path of what is wrong
    assert sentence[0].isupper() or sentence.startswith(names)
    return sentence


# ---- start, status, stop ---------------------------------------------------------------------------


def test_start_status_and_stop(cli, tiny_dir, short_dir):
    run_dir = short_dir / "run"
    where = ("--instance", "e2e-start", "--run-dir", run_dir)

    def status_of() -> dict:
        status = cli("status", *where, "--json")
        found = json.loads(status.stdout)
        assert status.returncode == (0 if found["state"] == "ready" else 1)
        return found

    down = cli("status", *where)
    assert "is not running" in one_sentence(down)
    assert "deepinfer start" in down.stderr

    started = cli("start", *where, "--model", tiny_dir, "--engine", "fake", "--port", "0")
    assert started.returncode == 0, started.stderr
    assert "is ready" in started.stdout
    try:
        found = status_of()
        # `start` has returned: no request meets a 503 from here on.
        asked = urllib.request.Request(
            found["url"] + "/v1/completions",
            json.dumps({**PROMPT, "max_tokens": 1}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=60) as reply:
            assert reply.status == 200
        # On a busy machine it may be degraded for a moment.
        eventually(lambda: status_of()["state"] == "ready", 60, "its status is ready")
        assert found["model"] == "tiny-llama"
        assert not found["url"].endswith(":0")
        assert (run_dir.stat().st_mode & 0o777) == 0o700
        names = " ".join(session_members(found["pid"]).values())
        for name in ("router", "worker/0", "tokenizer/0", "frontend/0"):
            assert f"deepinfer:{name} [e2e-start]" in names

        again = cli("start", *where, "--model", tiny_dir, "--engine", "fake", "--port", "0")
        assert f"already running (process {found['pid']})" in one_sentence(again)
        eventually(lambda: cli("status", *where).returncode == 0, 60, "it serves as before")
    finally:
        stopped = cli("stop", *where)
    assert stopped.returncode == 0, stopped.stderr
    assert session_members(found["pid"]) == {}
    assert not run_dir.exists()
    assert "is not running" in one_sentence(cli("stop", *where))


def test_start_shows_the_reason_of_a_failure(cli, short_dir, tmp_path):
    result = cli("start", "--run-dir", short_dir / "run", "--model", tmp_path, "--port", "0")
    assert result.returncode > 0
    assert "has no config.json" in result.stderr
    assert not (short_dir / "run").exists()


def test_serve_says_where_it_listens(serve):
    with serve(**FAKE) as server:
        # The daemon has written it before anybody hears that the instance is ready.
        eventually(lambda: server.listening().ask("status")["state"] == "ready", 90, "it is ready")
        assert server.address[1] != 0
        assert f"is ready at {server.url}" in server.output
        assert f"curl {server.url}/v1/chat/completions" in server.output


def test_a_second_serve_of_an_instance_is_refused(fake_server, cli):
    result = cli("serve", *fake_server.arguments)
    assert "is already running" in one_sentence(result)
    assert answers(fake_server)


def test_a_taken_port_is_one_sentence_and_leaves_nothing(fake_server, cli, tiny_dir, short_dir):
    port = fake_server.address[1]
    run_dir = short_dir / "run"
    result = cli("serve", "--model", tiny_dir, "--run-dir", run_dir, "--port", port)
    assert f"Port {port} is already in use" in one_sentence(result)
    assert not run_dir.exists()
    assert answers(fake_server)


def test_instances_side_by_side_do_not_disturb_each_other(serve):
    with serve(**FAKE) as first:
        with serve(**FAKE) as second:
            first.ready()
            second.ready()
            assert first.address != second.address
            body = {**LONG, "max_tokens": 400, "stream_options": {"include_usage": True}}
            with first.stream("/v1/completions", body) as stream:
                events = stream.events()
                next(events)
                second.signal(signal.SIGTERM)
                assert second.wait() == 0
                assert list(events)[-1]["usage"]["completion_tokens"] == 400
        assert answers(first)


# ---- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_with_code_zero(serve, number):
    with serve(**FAKE) as server:
        server.ready()
        server.signal(number)
        assert server.wait() == 0
        assert "stopped; nothing is left" in server.log


def test_a_signal_during_the_start_ends_it(serve):
    with serve() as server:
        server.listening()
        assert server.ask("status")["state"] == "starting"
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


def test_stop_during_the_start(serve, cli):
    with serve() as server:
        server.listening()
        result = cli("stop", "--instance", server.instance, "--run-dir", server.run_dir)
        assert result.returncode == 0, result.stderr
        assert server.wait() == 0


def test_a_killed_daemon_takes_its_children_along_and_can_be_started_anew(serve, short_dir):
    options = {"run_dir": short_dir / "run", "instance": "killed", **FAKE}
    with serve(**options) as first:
        first.ready()
        port = first.address[1]
        first.signal(signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
        with serve(**options, port=port) as second:  # at once: it ends what is left over itself
            second.ready()
            assert session_members(first.process.pid) == {}
            assert answers(second)


def test_children_of_a_killed_daemon_end_by_themselves(serve):
    with serve(**FAKE) as server:
        server.ready()
        server.signal(signal.SIGKILL)
        server.wait()
        eventually(lambda: not session_members(server.process.pid), 60, "all children have ended")
        shutil.rmtree(server.run_dir)


# ---- losses ----------------------------------------------------------------------------------------


def kill(server, name: str) -> None:
    """Kill a process and wait until the instance is whole again."""
    old = server.pids()[name]
    os.kill(old, signal.SIGKILL)
    eventually(lambda: server.pids()[name] not in (old, None), 60, f"{name} runs again")
    server.ready()


@pytest.fixture(scope="module")
def started_server(serve):
    """An instance whose processes are started as those of a user are."""
    with serve(**FAKE, forked=False) as server:
        yield server


@pytest.mark.parametrize("name", ["tokenizer/0", "frontend/0", "router", "worker/0"])
def test_a_lost_process_is_replaced_and_service_goes_on(started_server, name):
    server = started_server.ready()
    before = server.pids()
    kill(server, name)
    assert answers(server)
    after = server.pids()
    assert {key for key in after if after[key] != before[key]} == {name}
    assert server.metric("process_restarts_total", process=name) == 1


@pytest.fixture(scope="module")
def slow_server(serve):
    with serve(**SLOW, hang_seconds=120) as server:
        yield server


def test_a_request_at_a_lost_tokenizer_is_still_answered(slow_server):
    server = slow_server.ready()
    with ThreadPoolExecutor(1) as pool:
        tokenizer = psutil.Process(server.pids()["tokenizer/0"])
        tokenizer.suspend()
        body = {**PROMPT, "max_tokens": 3, "ignore_eos": True}
        reply = pool.submit(server.post, "/v1/completions", body)
        eventually(
            lambda: server.ask("status")["requests"]["tokenizing"], 60, "it is with the tokenizer"
        )
        tokenizer.kill()
        assert reply.result(60).status == 200


def test_a_lost_frontend_leaves_no_request_behind(slow_server):
    server = slow_server.ready()
    logged = len(server.log)
    with server.stream("/v1/completions", LONG) as stream:
        next(stream.events())
        assert eventually(lambda: server.ask("cache")[0]["pages_used"], 60, "it has pages") > 0
        os.kill(server.pids()["frontend/0"], signal.SIGKILL)
        eventually(lambda: not server.ask("cache")[0]["pages_used"], 60, "its pages are free")
        eventually(lambda: server.ask("requests") == [], 60, "the router has dropped it")
    server.ready()
    assert answers(server)
    assert " ERROR " not in server.log[logged:]


def test_a_lost_router_ends_its_streams_with_an_error(slow_server):
    server = slow_server.ready()
    with server.stream("/v1/completions", LONG) as stream:
        events = stream.events()
        next(events)
        os.kill(server.pids()["router"], signal.SIGKILL)
        assert "error" in list(events)[-1]
    eventually(lambda: not server.ask("cache")[0]["pages_used"], 60, "its pages are free")
    server.ready()
    assert answers(server)


@pytest.mark.slow
@pytest.mark.parametrize("dp", [1, 2])
def test_answers_survive_the_loss_of_their_worker(serve, dp):
    greedy = {**LONG, "max_tokens": 1400, "stream_options": {"include_usage": True}}
    sampled = {
        **LONG, "max_tokens": 800, "temperature": 1.1, "seed": 5, "n": 2, "top_p": 0.9,
        "frequency_penalty": 0.5, "repetition_penalty": 1.1, "logprobs": 1,
    }  # fmt: skip
    # Deterministic: what a worker computes anew must not part at a near tie.
    options = {"dp": dp, "routing": "least-loaded", "hang_seconds": 120, "deterministic": True}
    with serve(**options) as server, ThreadPoolExecutor(1) as pool:
        server.ready()
        workers = [server.pids()[f"worker/{rank}"] for rank in range(dp)]
        with server.stream("/v1/completions", greedy) as stream:
            wanted = list(stream.events())
        wanted_sampled = server.post("/v1/completions", sampled).json
        with server.stream("/v1/completions", greedy) as stream:
            events = stream.events()
            got = [next(events)]
            with one_event_at_a_time(workers) as go_on:
                reply = pool.submit(server.post, "/v1/completions", sampled)

                def rows_of_now() -> list[dict]:
                    """What the router tells is up to a heartbeat old, or more: until it knows of what
                    we have got. An event has one token at least."""
                    rows = server.ask("requests")
                    return rows if rows and rows[0]["output_tokens"] >= len(got) else []

                # Both are far from their end when one of the workers dies, however slow we look.
                while not begun(rows := eventually(rows_of_now, 60, "the router tells"), 2):
                    with go_on():
                        got.append(next(events))
                os.kill(server.pids()[f"worker/{rows[0]['rank']}"], signal.SIGKILL)
            got += events
        assert text_of(got) == text_of(wanted)
        assert got[-1]["usage"] == wanted[-1]["usage"]
        assert got[-1]["usage"]["completion_tokens"] == 1400
        found = reply.result(60).json
        assert texts(found) == texts(wanted_sampled)
        assert found["usage"] == wanted_sampled["usage"]
        server.ready()
        moved = sum(row["rank"] == rows[0]["rank"] for row in rows)
        migrations = "request_migrations_total"
        eventually(lambda: server.metric(migrations) == moved, 60, f"it has counted {moved}")


@contextlib.contextmanager
def one_event_at_a_time(pids: list[int]):
    """These processes stand still, except within the context that this one gives."""

    def send(number: int) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    @contextlib.contextmanager
    def go_on():
        send(signal.SIGCONT)
        yield
        send(signal.SIGSTOP)

    send(signal.SIGSTOP)
    try:
        yield go_on
    finally:
        send(signal.SIGCONT)


def begun(rows: list[dict], count: int) -> bool:
    return len(rows) == count and all(row["output_tokens"] for row in rows)


def text_of(events: list[dict]) -> str:
    assert not any("error" in event for event in events)
    return "".join(choice["text"] for event in events for choice in event["choices"])


def texts(answer: dict) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


# ---- models that cannot be served ------------------------------------------------------------------------


@pytest.fixture
def broken_dir(request, tiny_dir, tmp_path):
    """The tiny model, with one thing wrong."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_dir, folder)
    match request.param:
        case "missing":
            shutil.rmtree(folder)
        case "file":
            shutil.rmtree(folder)
            folder.write_text("no directory")
        case "no config":
            (folder / "config.json").unlink()
        case "bad config":
            (folder / "config.json").write_text("{")
        case "no weights":
            (folder / "model.safetensors").unlink()
        case "truncated weights":
            weights = folder / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-1000])
        case "unknown type":
            config = json.loads((folder / "config.json").read_text())
            config["model_type"], config["architectures"] = "gpt9", ["Gpt9ForCausalLM"]
            (folder / "config.json").write_text(json.dumps(config))
        case "only a tokenizer's config":
            (folder / "tokenizer.json").unlink()
        case "no tokenizer":
            (folder / "tokenizer.json").unlink()
            (folder / "tokenizer_config.json").unlink()
        case "bad tokenizer":
            (folder / "tokenizer.json").write_text('{"model": 5}')
    return folder


@pytest.mark.parametrize(
    ("broken_dir", "words"),
    [
        ("missing", "does not exist"),
        ("file", "is a file"),
        ("no config", "has no config.json"),
        ("bad config", "config"),
        ("no weights", "has no weights"),
        ("truncated weights", "safetensors"),
        ("unknown type", "gpt9"),
        ("only a tokenizer's config", "tokenizer"),
        ("no tokenizer", "has no tokenizer"),
        ("bad tokenizer", "tokenizer"),
    ],
    indirect=["broken_dir"],
)
def test_a_broken_model_is_one_sentence_and_leaves_nothing(cli, short_dir, broken_dir, words):
    run_dir = short_dir / "run"
    engine = "fake" if "tokenizer" in words else "auto"  # the quick one, where it does not matter
    result = cli(
        "serve", "--model", broken_dir, "--run-dir", run_dir, "--port", "0", "--engine", engine
    )
    sentence = one_sentence(result)
    assert words in sentence
    assert str(broken_dir) in sentence
    assert result.returncode == 2
    assert not run_dir.exists()


def test_overrides_that_do_not_fit_the_weights_are_a_wrong_configuration(cli, tiny_dir, short_dir):
    result = cli(
        "serve", "--model", tiny_dir, "--run-dir", short_dir / "run", "--port", "0",
        "--hf-overrides", '{"hidden_size": 96}',
    )  # fmt: skip
    one_sentence(result)
    assert result.returncode == 2
    assert not (short_dir / "run").exists()


# ---- the command line ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        (), ("serve",), ("start",), ("stop",), ("status",), ("config",), ("config", "show"),
        ("inspect",), ("inspect", "processes"), ("inspect", "requests"), ("inspect", "queues"),
        ("inspect", "cache"), ("inspect", "sockets"), ("top",),
    ],
    ids=" ".join,
)  # fmt: skip
def test_every_command_has_help(cli, command):
    result = cli(*command, "--help")
    assert result.returncode == 0
    assert result.stderr == ""
    assert "Usage: deepinfer" in result.stdout


def test_wrong_options_are_refused(cli):
    for arguments in (("--dp", "0"), ("--port", "70000"), ("--instance", "../x"), ("--what", "1")):
        result = cli("serve", *arguments)
        assert result.returncode == 2, arguments
        assert "Traceback" not in result.stderr
        assert arguments[0] in result.stderr


def test_config_show_tells_values_and_origins(cli, short_dir):
    file = short_dir / "instance.toml"
    file.write_text('port = 7001\ndp = 2\nmodel = "from-file"\nmax_waiting = 9\n')
    result = cli(
        "config", "show", "--config", file, "--port", "7003",
        DEEPINFER_PORT="7002", DEEPINFER_DP="3",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = {}
    for line in result.stdout.splitlines():
        if line.startswith("--"):
            option, value, origin = [*line.split(None, 2), "", ""][:3]
            rows[option] = (value, origin.strip())
    assert rows["--port"] == ("7003", "flag --port")
    assert rows["--dp"] == ("3", "environment DEEPINFER_DP")
    assert rows["--model"][0] == "from-file"
    assert rows["--model"][1].startswith("file ")
    assert rows["--max-waiting"][0] == "9"
    assert rows["--frontends"] == ("1", "default")


def test_config_show_refuses_an_unknown_key(cli, tmp_path):
    file = tmp_path / "instance.toml"
    file.write_text("prot = 7001\n")
    result = cli("config", "show", "--config", file)
    assert result.returncode == 2
    assert "prot" in result.stderr
