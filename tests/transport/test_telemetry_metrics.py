"""What is counted is what is read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.telemetry.metrics import MetricSet
from transport.telemetry.values import HistogramValue, QueueStats

BOUNDS = (0.1, 1.0, 10.0)


@given(st.lists(st.floats(0, 100)))
def test_a_bucket_counts_what_is_at_most_its_bound(values):
    histogram = MetricSet().histogram("latency", bounds=BOUNDS)
    for value in values:
        histogram.observe(value)
    read = histogram.read()
    assert read.bounds == BOUNDS
    assert sum(read.counts) == len(values)
    for number, bound in enumerate(BOUNDS):
        assert sum(read.counts[: number + 1]) == sum(value <= bound for value in values)
    assert read.total == pytest.approx(sum(values))


@given(st.floats(0, 100), st.integers(1, 50))
def test_observing_many_equals_observing_often(value, times):
    metrics = MetricSet()
    metrics.histogram("one", bounds=BOUNDS).observe_many(value, times)
    for _ in range(times):
        metrics.histogram("two", bounds=BOUNDS).observe(value)
    one, two = metrics.histogram("one").read(), metrics.histogram("two").read()
    assert one.counts == two.counts
    assert one.total == pytest.approx(two.total)


def test_the_same_name_and_labels_are_the_same_metric():
    metrics = MetricSet()
    metrics.counter("requests", "200").add()
    metrics.counter("requests", "200").add(2)
    metrics.counter("requests", "429").add()
    metrics.gauge("running").set(5)
    metrics.gauge("running").set(3)
    metrics.histogram("latency", "decode", bounds=BOUNDS).observe(2)
    assert metrics.read_counters() == {"requests": [(("200",), 3.0), (("429",), 1.0)]}
    assert metrics.read_gauges() == {"running": [((), 3.0)]}
    assert metrics.read_histograms() == {
        "latency": [(("decode",), HistogramValue(BOUNDS, (0, 0, 1, 0), 2.0))]
    }


def test_a_queue_remembers_its_deepest_moment():
    metrics = MetricSet()
    queue = metrics.queue("waiting", 10)
    for depth in (2, 7, 1):
        queue.set(depth)
    assert metrics.read_queues() == [QueueStats("waiting", 1, 7, 10)]
