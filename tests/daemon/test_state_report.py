"""Answers about an instance: right numbers, stable keys, known units."""

from __future__ import annotations

import os

import msgspec
import pytest

from daemon.inspection.control_server import QueryError
from daemon.inspection.report_types import StateReport
from daemon.inspection.state_report import QUESTIONS, answer
from daemon.metrics.exposition import MetricsExporter
from transport.ids import ProcessName, RequestId
from transport.messages.generate import StageTimes
from transport.messages.telemetry import RequestRow, Snapshot
from transport.telemetry import catalog
from transport.telemetry.metrics import MetricSet
from transport.telemetry.values import QueueStats, SocketStats

NOW = 1000.0  # as in conftest.py


def ask(what, view, exporter=None):
    return msgspec.json.decode(answer(what, view, exporter or MetricsExporter()))


def snapshot(name, metrics=None, state="ready", **fields):
    metrics = metrics or MetricSet()
    return Snapshot(
        ProcessName(name),
        os.getpid(),
        state,
        "",
        42,
        counters=metrics.read_counters(),
        gauges=metrics.read_gauges(),
        histograms=metrics.read_histograms(),
        **fields,
    )


def row(request_id, stage, rank=-1, prompt=0, output=0, since=0.0, **stages):
    return RequestRow(
        RequestId(request_id), stage, ProcessName("frontend/0"), rank, prompt, output, 1,
        StageTimes(**stages), since,
    )  # fmt: skip


@pytest.fixture
def worker(make_child):
    """Rank 3 with 100 of 400 pages in use and five preemptions."""
    metrics = MetricSet()
    for name, value in [
        (catalog.KV_PAGES_USED, 100), (catalog.KV_PAGES, 400), (catalog.SEQUENCE_SLOTS_USED, 6),
        (catalog.SEQUENCE_SLOTS, 32), (catalog.NUM_REQUESTS_RUNNING, 6), (catalog.NUM_REQUESTS_WAITING, 2),
    ]:  # fmt: skip
        metrics.gauge(name).set(value)
    metrics.counter(catalog.NUM_PREEMPTIONS).add(5)
    metrics.counter(catalog.PREFILL_TOKENS_COMPUTED).add(7000)
    metrics.counter(catalog.DECODE_TOKENS_COMPUTED).add(900)
    return make_child(snapshot("worker/3", metrics))


def test_an_unknown_question_is_refused_with_the_known_ones(make_view):
    with pytest.raises(QueryError, match=r"'weather'.*status, processes"):
        answer("weather", make_view(), MetricsExporter())


@pytest.mark.parametrize("what", [what for what in QUESTIONS if what != "metrics"])
def test_every_question_has_an_answer_even_before_anybody_has_reported(make_view, make_child, what):
    children = [make_child(name=name) for name in ("router", "frontend/0", "worker/0")]
    dead = make_child(name="worker/1", alive=False)
    assert ask(what, make_view(*children, dead, state="starting")) is not None


def test_metrics_are_the_exposition(make_view):
    text = answer("metrics", make_view(), MetricsExporter())
    assert b"\ndeepinfer:instance_ready 1.0\n" in text


def test_status_counts_requests_work_and_ranks(make_view, make_child, worker):
    router = MetricSet()
    for stage, value in [("queued", 4), ("running", 9)]:
        router.gauge(catalog.ROUTER_REQUESTS, stage).set(value)
    frontend = MetricSet()
    for seconds in (1.0, 2.0):
        frontend.histogram(catalog.E2E_REQUEST_LATENCY_SECONDS).observe(seconds)
    found = ask(
        "status",
        make_view(
            make_child(snapshot("router", router)),
            make_child(snapshot("frontend/0", frontend)),
            worker,
            make_child(name="worker/4"),
            state="degraded",
            reason="worker/4: starting",
        ),
    )
    assert found["state"] == "degraded"
    assert found["reason"] == "worker/4: starting"
    assert found["uptime_seconds"] == 3723
    assert (found["ranks"], found["ranks_ready"]) == (2, 1)
    assert found["requests"] == {"received": 0, "tokenizing": 0, "queued": 4, "running": 9}
    assert found["work"] == {"prompt_tokens": 7000, "generation_tokens": 900, "requests": 2}


def test_work_does_not_go_back_when_a_worker_dies(make_view, worker):
    exporter = MetricsExporter()
    exporter.process_ended(worker.last_snapshot)
    worker.process = worker.snapshot = worker.last_snapshot = None
    view = make_view(worker)
    assert ask("status", view, exporter)["work"]["prompt_tokens"] == 7000
    (row,) = ask("cache", view, exporter)
    known = {name: value for name, value in row.items() if value not in (None, "")}
    assert known == {"rank": 3, "process": "worker/3", "preemptions": 5}


def test_processes_that_live_are_measured(make_view, make_child):
    child = make_child(
        snapshot("worker/0"), restarts=1, last_exit="signal SIGKILL", progress_at=NOW - 30
    )
    daemon, found = ask("processes", make_view(child))
    assert (daemon["name"], daemon["pid"], daemon["state"]) == ("daemon", os.getpid(), "ready")
    assert found["rss_bytes"] > 1e6
    assert found["cpu_percent"] >= 0
    assert found["uptime_seconds"] == 100
    assert found["heartbeat_age_seconds"] == 0.2
    assert (found["progress"], found["progress_age_seconds"]) == (42, 30)
    assert (found["restarts"], found["last_exit"]) == (1, "signal SIGKILL")
    assert found["gpu_memory_bytes"] is None


def test_a_worker_with_a_gpu_tells_what_it_has_taken(make_view, make_child):
    metrics = MetricSet()
    metrics.gauge(catalog.GPU_MEMORY_BYTES).set(5e9)
    _, found = ask("processes", make_view(make_child(snapshot("worker/0", metrics))))
    assert found["gpu_memory_bytes"] == 5_000_000_000


def test_processes_that_do_not_live_say_so(make_view, make_child):
    waits = make_child(name="worker/0", alive=False, restart_at=NOW + 2, last_exit="exit code 1")
    gone = make_child(name="worker/1", alive=False, fatal="the model cannot be read")
    _, first, second = ask("processes", make_view(waits, gone))
    assert (first["state"], first["pid"], first["rss_bytes"]) == ("restarting", None, None)
    assert (second["state"], second["detail"]) == ("ended", "the model cannot be read")


def test_requests_show_age_and_time_per_stage_oldest_first(make_view, make_child):
    rows = [
        row("young", "tokenizing", received=NOW - 1, tokenizing=NOW - 0.75),
        row(
            "old", "running", rank=2, prompt=100, output=7, since=NOW - 2,
            received=NOW - 10, tokenizing=NOW - 9.5, queued=NOW - 9, running=NOW - 6,
        ),
        row("tokens", "queued", rank=0, prompt=5, received=NOW - 0.5, queued=NOW - 0.25),
    ]  # fmt: skip
    found = ask("requests", make_view(make_child(snapshot("router", requests=rows))))
    assert [request["request_id"] for request in found] == ["old", "young", "tokens"]
    old, young, tokens = found
    assert old["age_ms"] == 10_000
    stages = ("waiting_ms", "tokenizing_ms", "queued_ms", "running_ms")
    assert [old[stage] for stage in stages] == [500, 500, 3000, 6000]
    assert sum(old[stage] for stage in stages) == old["age_ms"]
    assert [young[stage] for stage in stages] == [250, 750, None, None]
    assert [tokens[stage] for stage in stages] == [250, None, 250, None]
    assert (old["rank"], young["rank"]) == (2, None)
    # Since it was moved to another worker; of the others it is not known.
    assert [request["stage_ms"] for request in found] == [2000, None, None]


def test_cache_shows_pages_and_slots_per_rank(make_view, worker):
    (found,) = ask("cache", make_view(worker))
    assert (found["rank"], found["pages_used"], found["pages_total"]) == (3, 100, 400)
    assert found["page_usage_ratio"] == 0.25
    assert (found["slots_used"], found["slots_total"], found["preemptions"]) == (6, 32, 5)


def test_queues_and_sockets_name_their_process(make_view, make_child):
    child = make_child(
        snapshot(
            "router",
            queues=[QueueStats("waiting requests", 2, 9, 256)],
            sockets=[SocketStats("router", 1, 2, 3, 4, 5)],
        )
    )
    assert ask("queues", make_view(child)) == [
        {"process": "router", "queue": "waiting requests", "depth": 2, "high_water": 9,
         "capacity": 256}
    ]  # fmt: skip
    daemon = [SocketStats("control", 6, 7, 8, 9, 0)]
    assert ask("sockets", make_view(child, sockets=daemon)) == [
        {"process": "daemon", "socket": "control", "received_messages": 6, "received_bytes": 7,
         "sent_messages": 8, "sent_bytes": 9, "refused_sends": 0},
        {"process": "router", "socket": "router", "received_messages": 1, "received_bytes": 2,
         "sent_messages": 3, "sent_bytes": 4, "refused_sends": 5}
    ]  # fmt: skip


def test_state_is_all_of_it_and_the_command_line_can_read_it(make_view, make_child, worker):
    rows = [row("one", "queued", received=NOW - 1, queued=NOW - 1)]
    view = make_view(make_child(snapshot("router", requests=rows)), worker)
    exporter = MetricsExporter()
    state = msgspec.json.decode(answer("state", view, exporter), type=StateReport, strict=True)
    assert [request.request_id for request in state.requests] == ["one"]
    assert [process.name for process in state.processes] == ["daemon", "router", "worker/3"]
    assert state.cache[0].pages_used == 100
    parts = ask("state", view, exporter)
    for what in ("queues", "cache", "sockets", "requests"):
        assert parts[what] == ask(what, view, exporter)
