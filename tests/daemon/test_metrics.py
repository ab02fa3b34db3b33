"""The exposition: complete, valid, and its sums never go back."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from daemon.metrics.exposition import MetricsExporter
from transport.messages.telemetry import Snapshot
from transport.telemetry import catalog
from transport.telemetry.catalog import BY_NAME, METRICS, CounterMetric, GaugeMetric
from transport.telemetry.metrics import MetricSet
from transport.telemetry.values import QueueStats, SocketStats

ROOT = Path(__file__).parents[2]
PRODUCT_FOLDERS = ("daemon", "frontend", "hicache", "transport", "workers")


def snapshot(name, metrics=None, **fields):
    metrics = metrics or MetricSet()
    return Snapshot(
        name=name,
        pid=1,
        state="ready",
        detail="",
        progress=7,
        counters=metrics.read_counters(),
        gauges=metrics.read_gauges(),
        histograms=metrics.read_histograms(),
        queues=metrics.read_queues(),
        **fields,
    )


def read(exposition: bytes):
    """Sample name and labels -> value, as a Prometheus server would store them."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(exposition.decode())
        for sample in family.samples
    }


def counting(metric, *labels, value):
    metrics = MetricSet()
    metrics.counter(metric, *labels).add(value)
    return metrics


# ---- what a scrape shows ---------------------------------------------------------------------------


def test_workers_keep_their_ranks_and_frontends_are_added_up(make_child, make_view):
    children = [
        make_child(snapshot(f"{role}/{number}", counting(metric, value=value)))
        for role, number, metric, value in [
            ("worker", 0, catalog.NUM_PREEMPTIONS, 3),
            ("worker", 1, catalog.NUM_PREEMPTIONS, 5),
            ("frontend", 0, catalog.GENERATION_TOKENS, 100),
            ("frontend", 1, catalog.GENERATION_TOKENS, 11),
        ]
    ]
    found = read(MetricsExporter().render(make_view(*children)))
    assert found["deepinfer:num_preemptions_total", (("rank", "0"),)] == 3
    assert found["deepinfer:num_preemptions_total", (("rank", "1"),)] == 5
    assert found["deepinfer:generation_tokens_total", ()] == 111


def test_gauges_of_several_frontends_are_added_up_and_vanish_with_their_process(
    make_child, make_view
):
    children = []
    for number, connections in enumerate((4, 6)):
        metrics = MetricSet()
        metrics.gauge(catalog.HTTP_CONNECTIONS).set(connections)
        children.append(make_child(snapshot(f"frontend/{number}", metrics)))
    exporter = MetricsExporter()
    assert read(exporter.render(make_view(*children)))["deepinfer:http_connections", ()] == 10
    children[0].process = children[0].snapshot = None
    assert read(exporter.render(make_view(*children)))["deepinfer:http_connections", ()] == 6


def test_a_histogram_has_cumulative_buckets_sum_and_count(make_child, make_view):
    children = []
    for number, values in enumerate(((0.0004, 0.3), (0.3, 1e6))):
        metrics = MetricSet()
        for value in values:
            metrics.histogram(catalog.TIME_TO_FIRST_TOKEN_SECONDS).observe(value)
        children.append(make_child(snapshot(f"frontend/{number}", metrics)))
    found = read(MetricsExporter().render(make_view(*children)))
    name = "deepinfer:time_to_first_token_seconds"
    assert found[name + "_bucket", (("le", "0.0005"),)] == 1
    assert found[name + "_bucket", (("le", "0.25"),)] == 1
    assert found[name + "_bucket", (("le", "0.5"),)] == 3
    assert found[name + "_bucket", (("le", "+Inf"),)] == found[name + "_count", ()] == 4
    assert found[name + "_sum", ()] == pytest.approx(1000000.6004, rel=1e-9)


def test_each_process_shows_its_memory_age_and_restarts(make_child, make_view):
    view = make_view(
        make_child(snapshot("worker/0"), restarts=2), make_child(name="worker/1", alive=False)
    )
    found = read(MetricsExporter().render(view))
    for process in ("worker/0", "daemon"):
        labels = (("process", process),)
        assert found["deepinfer:process_resident_memory_bytes", labels] > 1e6
        assert found["deepinfer:process_cpu_seconds_total", labels] > 0
        assert found["deepinfer:process_up", labels] == 1
    assert found["deepinfer:process_restarts_total", (("process", "worker/0"),)] == 2
    assert found["deepinfer:process_uptime_seconds", (("process", "worker/0"),)] == 100
    assert found["deepinfer:process_up", (("process", "worker/1"),)] == 0
    assert ("deepinfer:process_resident_memory_bytes", (("process", "worker/1"),)) not in found


@pytest.mark.parametrize(("state", "value"), [("ready", 1), ("degraded", 0), ("starting", 0)])
def test_instance_ready(make_view, state, value):
    found = read(MetricsExporter().render(make_view(state=state)))
    assert found["deepinfer:instance_ready", ()] == value


def test_queues_and_sockets_are_shown_by_process(make_child, make_view):
    view = make_view(
        make_child(
            Snapshot(
                "router", 1, "ready", "", 1,
                sockets=[SocketStats("router", 10, 2048, 20, 4096, 3)],
                queues=[QueueStats("waiting requests", 2, 9, 256)],
            )
        ),
        sockets=[SocketStats("control", 1, 2, 3, 77, 0)],
    )  # fmt: skip
    found = read(MetricsExporter().render(view))
    queue = (("process", "router"), ("queue", "waiting requests"))
    assert found["deepinfer:queue_depth", queue] == 2
    assert found["deepinfer:queue_high_water", queue] == 9
    socket = (("process", "router"), ("socket", "router"))
    assert found["deepinfer:socket_bytes_total", (("direction", "sent"), *socket)] == 4096
    assert found["deepinfer:socket_refused_sends_total", socket] == 3
    own = (("process", "daemon"), ("socket", "control"))
    assert found["deepinfer:socket_bytes_total", (("direction", "sent"), *own)] == 77


def test_running_appears_only_where_it_counts_running_requests(make_child, make_view):
    """Whoever adds up all lines that match `running` gets 0 from an idle instance."""
    metrics = MetricSet()
    for metric in METRICS:
        if metric.sources == ("worker",) and metric.kind == "gauge":
            metrics.gauge(metric, *["x"] * (len(metric.labels) - 1)).set(0)
    router = MetricSet()
    router.gauge(catalog.ROUTER_REQUESTS, "running").set(0)
    view = make_view(
        make_child(snapshot("worker/0", metrics), restarts=1),
        make_child(snapshot("router", router), restarts=1),
    )
    lines = MetricsExporter().render(view).decode().splitlines()
    samples = [line for line in lines if "running" in line and not line.startswith("#")]
    assert len(samples) == 2
    assert all(line.endswith(" 0.0") for line in samples)


def test_a_metric_that_the_catalog_lacks_is_still_exported(make_child, make_view):
    metrics = counting(CounterMetric("brand_new_thing", "", ("what",)), "a", value=4)
    found = read(MetricsExporter().render(make_view(make_child(snapshot("worker/0", metrics)))))
    assert found["deepinfer:brand_new_thing_total", (("label_1", "0"), ("label_2", "a"))] == 4


def test_a_series_that_contradicts_its_metric_does_not_spoil_the_scrape(make_child, make_view):
    metrics = counting(CounterMetric("generation_tokens", "", ("x",)), "too many", value=4)
    metrics.counter(catalog.PROMPT_TOKENS).add(8)
    metrics.gauge(GaugeMetric("num_aborted_requests", "")).set(1)
    found = read(MetricsExporter().render(make_view(make_child(snapshot("frontend/0", metrics)))))
    assert found["deepinfer:prompt_tokens_total", ()] == 8
    assert not [name for name, _ in found if "generation_tokens" in name or "aborted" in name]


# ---- sums never go back ---------------------------------------------------------------------------


def test_what_a_dead_process_counted_stays(make_child, make_view):
    exporter, metrics = MetricsExporter(), counting(catalog.REQUEST_SUCCESS, "stop", value=40)
    metrics.histogram(catalog.E2E_REQUEST_LATENCY_SECONDS).observe(2.0)
    child = make_child(snapshot("frontend/0", metrics))
    exporter.process_ended(child.last_snapshot)
    child.process = child.snapshot = child.last_snapshot = None
    labels = (("finished_reason", "stop"),)
    found = read(exporter.render(make_view(child)))
    assert found["deepinfer:request_success_total", labels] == 40
    assert found["deepinfer:e2e_request_latency_seconds_count", ()] == 1
    child.snapshot = child.last_snapshot = snapshot(
        "frontend/0", counting(catalog.REQUEST_SUCCESS, "stop", value=2)
    )
    found = read(exporter.render(make_view(child)))
    assert found["deepinfer:request_success_total", labels] == 42


def test_a_process_that_ends_while_the_instance_stops_still_counts(make_child, make_view):
    child = make_child(snapshot("frontend/0", counting(catalog.GENERATION_TOKENS, value=9)))
    child.process = child.snapshot = None
    found = read(MetricsExporter().render(make_view(child, state="draining")))
    assert found["deepinfer:generation_tokens_total", ()] == 9


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["count", "report", "die"]), st.integers(0, 1)), max_size=30
    )
)
def test_sums_never_go_back_and_lose_only_what_was_not_reported(steps, make_child, make_view):
    exporter, reported = MetricsExporter(), 0
    children = [make_child(snapshot(f"frontend/{number}")) for number in (0, 1)]
    sets = [MetricSet(), MetricSet()]
    unreported = [0, 0]
    last = 0
    for what, number in steps:
        child = children[number]
        if what == "count":
            sets[number].counter(catalog.GENERATION_TOKENS).add(5)
            unreported[number] += 5
        elif what == "report":
            child.snapshot = child.last_snapshot = snapshot(child.name, sets[number])
            reported += unreported[number]
            unreported[number] = 0
        else:
            if child.last_snapshot is not None:
                exporter.process_ended(child.last_snapshot)
            child.snapshot = child.last_snapshot = None
            sets[number], unreported[number] = MetricSet(), 0
        total = exporter.totals(make_view(*children)).counter(catalog.GENERATION_TOKENS)
        assert total == reported >= last
        last = total


# ---- the catalog ----------------------------------------------------------------------------------


def used_in_code():
    """(file, entry, kind, number of labels) of each metric that product code asks a MetricSet for."""
    for folder in PRODUCT_FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not (isinstance(node, ast.Call) and node.args):
                    continue
                entry, *labels = node.args
                owner, _, kind = ast.unparse(node.func).rpartition(".")
                kind = kind or owner
                if kind not in ("counter", "gauge", "histogram") or owner == "totals":
                    continue
                if re.fullmatch(r"catalog\.[A-Z_0-9]+", ast.unparse(entry)):
                    where = f"{path.relative_to(ROOT)}:{node.lineno}"
                    assert not any(isinstance(label, ast.Starred) for label in labels), where
                    yield where, getattr(catalog, entry.attr), kind, len(labels)


def test_every_metric_of_the_code_has_its_kind_and_labels():
    used = list(used_in_code())
    assert len(used) > 30, "the search for metrics in the code finds too few"
    for where, metric, kind, labels in used:
        assert (kind, labels) == (metric.kind, len(metric.process_labels)), f"{where}: {metric}"


def test_the_catalog_has_no_metric_that_nobody_counts(make_child, make_view):
    used = {metric.name for _, metric, _, _ in used_in_code()}
    sent = {metric.name for metric in METRICS if metric.sources != ("daemon",)}
    assert sent <= used
    view = make_view(
        make_child(
            Snapshot(
                "router", 1, "ready", "", 1,
                sockets=[SocketStats("router", 1, 1, 1, 1, 1)],
                queues=[QueueStats("waiting requests", 2, 9, 256)],
            )
        )
    )  # fmt: skip
    shown = {name for name, _ in read(MetricsExporter().render(view))}
    own = {metric.exposed_name for metric in METRICS if metric.sources == ("daemon",)}
    assert own == shown


def test_names_are_unique_and_valid():
    assert len(BY_NAME) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
        assert not metric.name.endswith(("_total", "_bucket", "_sum", "_count"))
        assert "running" not in metric.name or metric.name == "num_requests_running"


def test_snapshots_survive_the_wire(make_child, make_view):
    """What the exporter gets has been through msgpack: label tuples must still be tuples."""
    metrics = counting(catalog.HTTP_REQUESTS, "/v1/models", "200", value=1)
    metrics.histogram(catalog.ENGINE_STEP_SECONDS, "prompt").observe(1.0)
    sent = msgspec.msgpack.encode(snapshot("worker/0", metrics))
    received = msgspec.msgpack.decode(sent, type=Snapshot)
    found = read(MetricsExporter().render(make_view(make_child(received))))
    labels = (("kind", "prompt"), ("rank", "0"))
    assert found["deepinfer:engine_step_seconds_count", labels] == 1
