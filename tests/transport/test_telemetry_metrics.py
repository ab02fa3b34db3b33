"""What is counted is what is read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.telemetry.catalog import CounterMetric, GaugeMetric, HistogramMetric
from transport.telemetry.metrics import MetricSet
from transport.telemetry.values import HistogramValue, QueueStats

BOUNDS = (0.1, 1.0, 10.0)
LATENCY = HistogramMetric("latency", "A latency.", bounds=BOUNDS)
LATENCY_OF = HistogramMetric("latency", "A latency, by kind.", ("kind",), bounds=BOUNDS)
ONE = HistogramMetric("one", "One.", bounds=BOUNDS)
TWO = HistogramMetric("two", "Two.", bounds=BOUNDS)
REQUESTS = CounterMetric("requests", "Requests, by status.", ("status",))
RUNNING = GaugeMetric("running", "What runs.")


@given(st.lists(st.floats(0, 100) | st.sampled_from(BOUNDS)))
def test_a_bucket_counts_what_is_at_most_its_bound(values):
    histogram = MetricSet().histogram(LATENCY)
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
    metrics.histogram(ONE).observe_many(value, times)
    for _ in range(times):
        metrics.histogram(TWO).observe(value)
    one, two = metrics.histogram(ONE).read(), metrics.histogram(TWO).read()
    assert one.counts == two.counts
    assert one.total == pytest.approx(two.total)


def test_the_same_name_and_labels_are_the_same_metric():
    metrics = MetricSet()
    metrics.counter(REQUESTS, "200").add()
    metrics.counter(REQUESTS, "200").add(2)
    metrics.counter(REQUESTS, "429").add()
    metrics.gauge(RUNNING).set(5)
    metrics.gauge(RUNNING).set(3)
    metrics.histogram(LATENCY_OF, "decode").observe(2)
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


def test_a_metric_has_the_labels_that_its_entry_says():
    with pytest.raises(ValueError, match="requests has the labels"):
        MetricSet().counter(REQUESTS)
    of_a_rank = CounterMetric("steps", "Steps of a rank.", ("rank", "kind"))
    MetricSet().counter(of_a_rank, "prompt")  # the daemon adds the rank
