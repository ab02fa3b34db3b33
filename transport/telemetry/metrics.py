"""Counters, gauges and histograms of one process, sent to the daemon as cumulative snapshots.

The daemon owns the exposition (`daemon/metrics/exposition.py`); processes only count.
Update a handle from the thread that owns it. The snapshot is taken by another thread; a value may be
one update old, never torn.
"""

from __future__ import annotations

from bisect import bisect_left

from transport.telemetry.catalog import CounterMetric, GaugeMetric, HistogramMetric, Metric
from transport.telemetry.values import HistogramValue, QueueStats

Labels = tuple[str, ...]


class Counter:
    """Only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float = 1.0) -> None:
        self.value += amount

    def set_total(self, value: float) -> None:
        """Take over what is counted elsewhere, and only grows there."""
        self.value = value


class Gauge:
    """A value that goes up and down."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def set(self, value: float) -> None:
        self.value = value


class Histogram:
    """Counts of observed values per bucket."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def observe_many(self, value: float, times: int) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def read(self) -> HistogramValue:
        return HistogramValue(self._bounds, tuple(self._counts), self._total)


class QueueGauge:
    """Depth of one bounded queue with its high-water mark."""

    __slots__ = ("_capacity", "_depth", "_high_water", "_name")

    def __init__(self, name: str, capacity: int) -> None:
        self._name, self._capacity = name, capacity
        self._depth = self._high_water = 0

    def set(self, depth: int) -> None:
        self._depth = depth
        self._high_water = max(self._high_water, depth)

    def read(self) -> QueueStats:
        return QueueStats(self._name, self._depth, self._high_water, self._capacity)


class MetricSet:
    """All metrics of one process. Asking twice for the same metric and labels gives the same handle."""

    def __init__(self) -> None:
        self._counters: dict[tuple[str, Labels], Counter] = {}
        self._gauges: dict[tuple[str, Labels], Gauge] = {}
        self._histograms: dict[tuple[str, Labels], Histogram] = {}
        self._queues: dict[str, QueueGauge] = {}

    def counter(self, metric: CounterMetric, *labels: str) -> Counter:
        found = self._counters.get((metric.name, labels))
        if found is None:
            found = self._counters[_key(metric, labels)] = Counter()
        return found

    def gauge(self, metric: GaugeMetric, *labels: str) -> Gauge:
        found = self._gauges.get((metric.name, labels))
        if found is None:
            found = self._gauges[_key(metric, labels)] = Gauge()
        return found

    def histogram(self, metric: HistogramMetric, *labels: str) -> Histogram:
        found = self._histograms.get((metric.name, labels))
        if found is None:
            found = self._histograms[_key(metric, labels)] = Histogram(metric.bounds)
        return found

    def queue(self, name: str, capacity: int) -> QueueGauge:
        return self._queues.setdefault(name, QueueGauge(name, capacity))

    def read_counters(self) -> dict[str, list[tuple[Labels, float]]]:
        return _grouped([(key, counter.value) for key, counter in list(self._counters.items())])

    def read_gauges(self) -> dict[str, list[tuple[Labels, float]]]:
        return _grouped([(key, gauge.value) for key, gauge in list(self._gauges.items())])

    def read_histograms(self) -> dict[str, list[tuple[Labels, HistogramValue]]]:
        grouped: dict[str, list[tuple[Labels, HistogramValue]]] = {}
        for (name, labels), histogram in list(self._histograms.items()):
            grouped.setdefault(name, []).append((labels, histogram.read()))
        return grouped

    def read_queues(self) -> list[QueueStats]:
        return [queue.read() for queue in list(self._queues.values())]


def _key(metric: Metric, labels: Labels) -> tuple[str, Labels]:
    if len(labels) != len(metric.process_labels):
        raise ValueError(f"{metric.name} has the labels {metric.process_labels}, not {labels}")
    return metric.name, labels


def _grouped(
    values: list[tuple[tuple[str, Labels], float]],
) -> dict[str, list[tuple[Labels, float]]]:
    grouped: dict[str, list[tuple[Labels, float]]] = {}
    for (name, labels), value in values:
        grouped.setdefault(name, []).append((labels, value))
    return grouped
