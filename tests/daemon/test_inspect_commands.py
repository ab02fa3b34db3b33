"""`inspect` and `top` against a daemon's control socket in this process."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import zmq
from rich.console import Console

from daemon.cli.inspect import inspect_app
from daemon.cli.inspect.cache import cache_view
from daemon.cli.inspect.processes import processes_table
from daemon.cli.inspect.requests import requests_table
from daemon.cli.inspect.usage_bar import usage_bar
from daemon.cli.throughput import Throughput
from daemon.cli.top import frame
from daemon.cli.units import duration, rate, size
from daemon.errors import DeepInferError
from daemon.inspection.control_server import ControlServer
from daemon.inspection.inspection_client import InspectionClient
from daemon.inspection.report_types import CacheRow, StateReport, WorkDone
from daemon.inspection.state_report import answer
from daemon.metrics.exposition import MetricsExporter
from daemon.system.run_directory import RunDirectory
from transport.ids import ProcessName, RequestId
from transport.messages.cache_report import CacheContent, PrefixMiss, PrefixUse
from transport.messages.generate import StageTimes
from transport.messages.telemetry import RequestRow, Snapshot
from transport.sockets import Endpoints
from transport.telemetry import catalog
from transport.telemetry.metrics import MetricSet
from transport.telemetry.values import QueueStats, SocketStats

ROOT = Path(__file__).parents[2]
SECONDS = 20.0


class FakeDaemon:
    """Answers questions of a fabricated instance from a thread."""

    def __init__(self, run_dir: Path, view) -> None:
        self.view = view
        self.stops: list[float | None] = []
        self._exporter = MetricsExporter()
        self._end = threading.Event()
        self._bound = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(run_dir,))
        self._thread.start()
        assert self._bound.wait(SECONDS)

    def _serve(self, run_dir: Path) -> None:
        context = zmq.Context()
        server = ControlServer(context, Endpoints(str(run_dir)), "hash")
        poller = zmq.Poller()
        server.register(poller)
        self._bound.set()
        while not self._end.is_set():
            poller.poll(20)
            server.handle_incoming(self, self)
        server.close()
        context.term()

    def answer(self, what: str) -> bytes:
        return answer(what, self.view, self._exporter)

    def living(self) -> dict[ProcessName, int]:
        return {ProcessName("router"): os.getpid(), ProcessName("worker/0"): os.getpid()}

    def stop_requested(self, drain_timeout: float | None) -> None:
        self.stops.append(drain_timeout)

    def close(self) -> None:
        self._end.set()
        self._thread.join(SECONDS)


def router_snapshot(requests=()):
    metrics = MetricSet()
    metrics.gauge(catalog.ROUTER_REQUESTS, "queued").set(len(requests))
    return Snapshot(
        ProcessName("router"),
        os.getpid(),
        "ready",
        "",
        1,
        gauges=metrics.read_gauges(),
        sockets=[SocketStats("router", 1234, 2048, 5, 6, 0)],
        queues=[
            QueueStats("waiting requests", 2, 256, 256),
            QueueStats("choices at worker/0", 3, 9, 0),
        ],
        requests=list(requests),
    )


def waiting_request(number):
    return RequestRow(
        RequestId(f"cmpl-{number:03}"), "queued", ProcessName("frontend/0"), 0, 1500, 0, 1,
        StageTimes(received=990.0 + number / 1000, queued=995.0), stage_since=998.0,
    )  # fmt: skip


def worker_snapshot():
    metrics = MetricSet()
    for name, value in [
        (catalog.KV_PAGES_USED, 512),
        (catalog.KV_PAGES, 2048),
        (catalog.SEQUENCE_SLOTS, 32),
    ]:
        metrics.gauge(name).set(value)
    return Snapshot(
        ProcessName("worker/0"), os.getpid(), "ready", "", 1, gauges=metrics.read_gauges()
    )


@pytest.fixture
def idle_view(make_child, make_view):
    return make_view(make_child(router_snapshot()), make_child(worker_snapshot()))


@pytest.fixture
def busy_view(make_child, make_view):
    rows = [waiting_request(number) for number in range(40)]
    return make_view(
        make_child(router_snapshot(rows)),
        make_child(worker_snapshot(), restarts=2, last_exit="signal SIGKILL"),
        make_child(name="worker/1", alive=False, last_exit="exit code 1", restart_at=1001.0),
        state="degraded",
        reason="worker/1: ended with exit code 1",
    )


@pytest.fixture
def locked(tmp_path):
    """A run directory that a daemon owns."""
    directory = RunDirectory.lock(tmp_path / "run", "default")
    yield directory.path
    directory.close()


@pytest.fixture
def daemon(locked, busy_view):
    fake = FakeDaemon(locked, busy_view)
    yield SimpleNamespace(path=locked, fake=fake)
    fake.close()


def inspect(capsys, *arguments):
    inspect_app([str(argument) for argument in arguments], result_action="return_value")
    return capsys.readouterr().out


def as_text(renderable, width=100):
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(renderable)
    return console.file.getvalue()


# ---- the client ---------------------------------------------------------------------------------


def test_without_an_instance_it_says_how_to_start_one(tmp_path):
    with pytest.raises(DeepInferError, match=r"'mine' is not running.*--instance mine"):
        InspectionClient(tmp_path, "mine")


def test_a_daemon_that_does_not_answer_is_reported_in_time(locked):
    with (
        InspectionClient(locked, "asked-for") as client,
        pytest.raises(
            DeepInferError, match=rf"'default' \(process {os.getpid()}\) has not answered"
        ),
    ):
        client.ask("status", 0.3)


def test_an_instance_that_ends_while_we_ask_is_reported_at_once(tmp_path):
    directory = RunDirectory.lock(tmp_path / "run", "default")
    ended = threading.Timer(0.2, directory.close)
    with InspectionClient(directory.path, "default") as client:
        ended.start()
        with pytest.raises(DeepInferError, match="is not running"):
            client.ask("status", 600.0)
    ended.join()


def test_questions_one_after_the_other_get_their_own_answers(daemon):
    with InspectionClient(daemon.path, "default") as client:
        assert json.loads(client.ask("status", SECONDS))["state"] == "degraded"
        assert len(json.loads(client.ask("requests", SECONDS))) == 40
        with pytest.raises(DeepInferError, match="no question 'weather'"):
            client.ask("weather", SECONDS)
        assert b"deepinfer:instance_ready 0.0" in client.ask("metrics", SECONDS)


def test_a_late_answer_is_not_taken_for_the_next_one(locked, idle_view):
    with InspectionClient(locked, "default") as client:
        with pytest.raises(DeepInferError, match="has not answered"):
            client.ask("processes", 0.05)
        fake = FakeDaemon(locked, idle_view)  # now the first question is answered, too
        try:
            assert json.loads(client.ask("status", SECONDS))["state"] == "ready"
        finally:
            fake.close()


def test_two_clients_of_one_process_do_not_mix_up(daemon):
    with (
        InspectionClient(daemon.path, "default") as one,
        InspectionClient(daemon.path, "default") as other,
    ):
        assert isinstance(json.loads(other.ask("queues", SECONDS)), list)
        assert isinstance(json.loads(one.ask("status", SECONDS)), dict)


@pytest.mark.parametrize("drain_timeout", [None, 0.0, 2.5])
def test_stop_hands_over_the_drain_limit(daemon, drain_timeout):
    with InspectionClient(daemon.path, "default") as client:
        client.stop(drain_timeout)
        client.ask("status", SECONDS)  # the daemon notes the stop after it has said yes
    assert daemon.fake.stops == [drain_timeout]


# ---- the commands -------------------------------------------------------------------------------


def test_processes(daemon, capsys):
    lines = inspect(capsys, "processes", "--run-dir", daemon.path).splitlines()
    assert [line.split()[0] for line in lines] == [
        "process", "daemon", "router", "worker/0", "worker/1",
    ]  # fmt: skip
    assert "restarted 2×; last exit: signal SIGKILL" in lines[3]
    assert "restarting" in lines[4]
    assert "gpu" not in lines[0]


def test_gpu_memory_is_shown_where_there_is_a_gpu(make_child, make_view):
    metrics = MetricSet()
    metrics.gauge(catalog.GPU_MEMORY_BYTES).set(3 * 2**30)
    snapshot = msgspec.structs.replace(worker_snapshot(), gauges=metrics.read_gauges())
    view = make_view(make_child(router_snapshot()), make_child(snapshot))
    text = as_text(processes_table(read_state(view).processes))
    assert "gpu" in text.splitlines()[0]
    assert "3.0 GiB" in next(line for line in text.splitlines() if "worker/0" in line)


def test_a_process_that_stands_still_is_marked(make_child, make_view):
    child = make_child(worker_snapshot(), progress_at=900.0)
    found = answer("state", make_view(child), MetricsExporter())
    rows = msgspec.json.decode(found, type=StateReport).processes
    assert "stands still for 100 s" in as_text(processes_table(rows))


def test_requests(daemon, capsys):
    lines = inspect(capsys, "requests", "--run-dir", daemon.path).splitlines()
    assert len(lines) == 41
    assert lines[1].split() == [
        "cmpl-000", "queued", "0", "2.0", "s", "10", "s", "1,500", "0", "–", "5.0", "s", "–",
    ]  # fmt: skip


def test_no_requests_are_said_in_words(locked, idle_view, capsys):
    fake = FakeDaemon(locked, idle_view)
    try:
        assert inspect(capsys, "requests", "--run-dir", locked) == "No live requests.\n"
        assert inspect(capsys, "requests", "--json", "--run-dir", locked) == "[]\n"
    finally:
        fake.close()


def test_queues_cache_and_sockets(daemon, capsys):
    queues = inspect(capsys, "queues", "--run-dir", daemon.path)
    assert queues.splitlines()[1].split() == ["router", "waiting", "requests", "2", "256", "256"]
    assert queues.splitlines()[2].split()[-3:] == ["3", "9", "–"]  # no bound of its own
    rows = json.loads(inspect(capsys, "queues", "--json", "--run-dir", daemon.path))
    assert [row["capacity"] for row in rows] == [256, None]
    cache = inspect(capsys, "cache", "--run-dir", daemon.path)
    assert "25 %" in cache
    assert "512 / 2,048" in cache
    assert "not loaded yet" in cache.splitlines()[2]
    assert "worker/0 says nothing of its cache: it is starting" in cache
    assert "worker/1 says nothing of its cache: it is not running" in cache
    sockets = inspect(capsys, "sockets", "--run-dir", daemon.path)
    assert "1,234   2.0 KiB" in sockets


@pytest.mark.parametrize("what", ["processes", "requests", "queues", "cache", "sockets"])
def test_json_is_the_daemons_answer(daemon, capsys, what):
    found = json.loads(inspect(capsys, what, "--json", "--run-dir", daemon.path))
    assert len(found) == len(json.loads(daemon.fake.answer(what))) > 0
    assert found[0].keys() == json.loads(daemon.fake.answer(what))[0].keys()


def test_follow_prints_a_line_of_json_each_second_until_interrupted(daemon):
    with command("inspect", "queues", "--follow", "--json", "--run-dir", daemon.path) as process:
        rows = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 0
    assert rows[0] == rows[1]
    assert rows[0][0]["queue"] == "waiting requests"


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_follow_ends_quietly_when_nobody_reads_on(daemon, options):
    with command("inspect", "queues", "--follow", *options, "--run-dir", daemon.path) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(SECONDS) == 1
        assert process.stderr.read() == b""


def test_commands_do_not_wait_for_heavy_libraries():
    code = (
        "import sys, daemon.cli.inspect, daemon.cli.top\n"
        "print([m for m in ('torch', 'transformers', 'prometheus_client') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    assert found.stdout == b"[]\n"


@contextlib.contextmanager
def command(*arguments):
    line = [sys.executable, "-m", "daemon.cli.main", *map(str, arguments)]
    process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        try:
            yield process
        finally:
            process.kill()


# ---- top ----------------------------------------------------------------------------------------


def read_state(view):
    return msgspec.json.decode(answer("state", view, MetricsExporter()), type=StateReport)


def test_a_frame_fits_the_screen_and_says_what_it_hides(busy_view):
    state = read_state(busy_view)
    text = as_text(frame(state, Throughput().rates(), 24))
    assert len(text.splitlines()) == 24
    for wanted in ("degraded", "http://127.0.0.1:8888", "SmolLM2-135M-Instruct", "worker/1: ended"):
        assert wanted in text
    hidden = int(text.splitlines()[-1].split()[1])
    assert text.count("cmpl-") + hidden == 40


@pytest.mark.parametrize("width", [80, 100, 160])
def test_no_line_of_a_frame_is_wider_than_the_screen(busy_view, width):
    text = as_text(frame(read_state(busy_view), Throughput().rates(), None), width)
    assert max(map(len, text.splitlines())) <= width
    assert text.count("cmpl-") == 40


def test_top_once_prints_one_frame(daemon):
    with command("top", "--once", "--run-dir", daemon.path) as process:
        out, error = process.communicate(timeout=SECONDS)
    assert (process.returncode, error) == (0, b"")
    assert out.decode().count("SmolLM2-135M-Instruct") == 1


def test_top_as_json_is_all_that_is_known_at_one_moment(daemon):
    with command("top", "--json", "--run-dir", daemon.path) as process:
        out, error = process.communicate(timeout=SECONDS)
    assert (process.returncode, error) == (0, b"")
    found = msgspec.json.decode(out, type=StateReport)
    assert found.status.instance == "default"
    assert len(found.requests) == 40


def test_top_draws_on_a_terminal_until_interrupted(daemon):
    master, slave = pty.openpty()
    line = [sys.executable, "-m", "daemon.cli.main", "top", "--run-dir", str(daemon.path)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    with subprocess.Popen(line, cwd=ROOT, stdout=slave, stderr=slave, env=environment) as process:
        os.close(slave)
        try:
            read_until(master, b"degraded")
            read_until(master, b"degraded")  # drawn again
            process.send_signal(signal.SIGINT)
            read_until(master, b"\x1b[?1049l")  # the screen as it was
            assert process.wait(SECONDS) == 0
        finally:
            process.kill()
            os.close(master)


def read_until(fd: int, wanted: bytes) -> None:
    seen = b""
    while wanted not in seen:
        assert select.select([fd], [], [], SECONDS)[0], f"no {wanted!r} in {seen!r}"
        seen += os.read(fd, 4096)


def sample(uptime, prompt=0, generation=0, requests=0):
    work = WorkDone(prompt, generation, requests)
    return SimpleNamespace(uptime_seconds=uptime, work=work)


def test_rates_are_the_mean_of_the_last_seconds():
    throughput = Throughput()
    assert throughput.rates().generation_tokens is None
    for second in range(21):  # ten seconds at 100 tok/s, then ten at 10
        generated = 100 * min(second, 10) + 10 * max(second - 10, 0)
        throughput.add(sample(second, prompt=7 * second, generation=generated, requests=second))
    rates = throughput.rates()
    assert (rates.prompt_tokens, rates.generation_tokens, rates.requests) == (7, 10, 1)


def test_rates_begin_anew_with_a_new_instance():
    throughput = Throughput()
    throughput.add(sample(100.0, generation=5000))
    throughput.add(sample(1.0, generation=10))
    assert throughput.rates().generation_tokens is None
    throughput.add(sample(2.0, generation=40))
    assert throughput.rates().generation_tokens == 30


# ---- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"), (0.0, "0.0 ms"), (0.00234, "2.3 ms"), (0.42, "420 ms"), (1.26, "1.3 s"),
        (84.2, "84 s"), (600.0, "10 min"), (7200.0, "2.0 h"), (400_000.0, "4.6 d"),
    ],
)  # fmt: skip
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (17, "17 B"), (1536, "1.5 KiB"), (361_000_000, "344 MiB"), (3 << 30, "3.0 GiB")],
)
def test_sizes(value, text):
    assert size(value) == text


def test_rates_in_words():
    assert [rate(value) for value in (None, 0.0, 12.34, 1234.5)] == ["–", "0.0", "12.3", "1,234"]


@pytest.mark.parametrize(("ratio", "cells"), [(0.0, 0), (0.5, 7), (1.0, 14)])
def test_bars_show_the_share(ratio, cells):
    bar = usage_bar(ratio).plain
    assert bar.count("█") == cells
    assert bar.endswith(f"{100 * ratio:.0f} %")


def test_prefix_caches_are_shown_with_what_saves_and_what_missed():
    content = CacheContent(
        enabled=True,
        top_prefixes=[PrefixUse(1280, 41, 3.0, True), PrefixUse(256, 2, 9.0, True)],
        recent_misses=[PrefixMiss(12.0, 900, 256, 768, "capped by missing state", "cmpl-12ab")],
    )
    row = CacheRow(
        0, "worker/0", 1, 2, 0.5, 1, 4, 1, 0, 0, host_pages_used=50, host_pages_total=100,
        host_states_used=3, host_states_total=8, oldest_page_seconds=600, hit_ratio=0.87,
        prefix_cache=content,
    )  # fmt: skip
    silent = msgspec.structs.replace(row, rank=1, process="worker/1", prefix_cache=None,
                                     problem="it is stopped")  # fmt: skip
    text = as_text(cache_view([row, silent]), width=100)
    missed = ("capped by missing state", "cmpl-12ab")
    for shown in ("50 / 100", "3 / 8", "10 min", "87 %", "1,280", *missed):
        assert shown in text
    assert text.index("1,280") < text.index("256")
    assert "worker/1 says nothing of its cache: it is stopped" in text


def test_without_a_prefix_cache_nothing_is_said_of_it():
    row = CacheRow(0, "worker/0", 1, 2, 0.5, 1, 4, 1, 0, 0)
    assert "prefix" not in as_text(cache_view([row]), width=100)


def test_a_long_request_id_gives_way_to_the_numbers(daemon):
    rows = read_state(daemon.fake.view).requests
    long = [msgspec.structs.replace(rows[0], request_id="chatcmpl-" + 40 * "f", age_ms=84_000.0)]
    text = as_text(requests_table(long), width=80)
    assert "84 s" in text
    assert "…" in text
