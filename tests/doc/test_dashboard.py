"""The Grafana dashboard asks for nothing that is not counted."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from transport.telemetry.catalog import METRICS, PREFIX, Metric

DASHBOARD = json.loads((Path(__file__).parents[2] / "doc/grafana/deepinfer.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
NAME = re.compile(rf"{PREFIX}(\w+)")
FROM_PROMETHEUS = {"instance", "job"}


def exposed() -> Iterator[tuple[str, Metric]]:
    """Names as they can be queried."""
    for metric in METRICS:
        suffixes = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        for suffix in suffixes:
            yield metric.exposed_name + suffix, metric


EXPOSED = dict(exposed())
QUERIES = [(p["title"], target["expr"]) for p in PANELS for target in p["targets"]]


def queried(text: str) -> set[str]:
    return {PREFIX + name for name in NAME.findall(text)}


@pytest.mark.parametrize(("title", "query"), QUERIES)
def test_every_query_is_of_known_metrics_and_labels(title, query):
    names = queried(query)
    assert names
    assert names <= EXPOSED.keys(), f"{title}: {names - EXPOSED.keys()} is not counted"
    has = FROM_PROMETHEUS.union(*(EXPOSED[name].labels for name in names))
    if any(name.endswith("_bucket") for name in names):
        has.add("le")
    by = {
        label.strip()
        for group in re.findall(r"by \(([^)]*)\)", query)
        for label in group.split(",")
    }
    selected = set(re.findall(r"[{,]\s*(\w+)\s*[=!]", query))
    assert by | selected <= has, title
    for name in names:
        is_counted = re.search(rf"(rate|increase)\({name}\{{", query) is not None
        grows = EXPOSED[name].kind != "gauge"
        assert is_counted == grows or title == "Restarts", (
            f"{title}: {name} is a {EXPOSED[name].kind}"
        )
    assert query.count("(") == query.count(")")


def test_legends_name_labels_of_their_query():
    for panel in PANELS:
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert re.search(rf"by \([^)]*\b{label}\b", target["expr"]), panel["title"]


def test_the_variables_exist():
    variables = {v["name"]: v for v in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(DASHBOARD)))
    assert used <= variables.keys()
    assert variables["datasource"]["type"] == "datasource"
    assert queried(variables["instance"]["definition"]) <= EXPOSED.keys()
    assert all(p["datasource"]["uid"] == "${datasource}" for p in PANELS)


def test_it_shows_what_an_operator_looks_for():
    seen = queried(json.dumps(DASHBOARD))
    for metric in (
        "router_requests", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket", "decode_tokens_computed_total", "kv_cache_usage_perc",
        "num_preemptions_total", "queue_depth", "admission_rejections_total",
        "process_restarts_total", "process_resident_memory_bytes", "process_cpu_seconds_total",
        "process_heartbeat_age_seconds", "instance_ready",
    ):  # fmt: skip
        assert PREFIX + metric in seen, metric


def test_panels_do_not_overlap_and_have_numbers_of_their_own():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    boxes = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    for one, other in itertools.combinations(boxes, 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y, (one, other)
    assert all(box["x"] + box["w"] <= 24 for box in boxes)
