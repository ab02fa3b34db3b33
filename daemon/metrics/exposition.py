"""The Prometheus exposition of an instance, out of the snapshots of its processes.

The daemon owns it, so that one scrape of any frontend shows the whole instance, and a restart of
a process does not set back what it had counted. What a process counted after its last snapshot
is lost with it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from daemon.metrics.totals import Labels, Totals, rank_labels
from daemon.supervision.instance_view import InstanceView
from daemon.supervision.supervisor import Child
from daemon.system.process_usage import ProcessUsage
from transport.messages.telemetry import Snapshot
from transport.telemetry import catalog
from transport.telemetry.catalog import (
    BY_NAME,
    PREFIX,
    CounterMetric,
    GaugeMetric,
    HistogramMetric,
    Kind,
    Metric,
)
from transport.telemetry.values import HistogramValue

DAEMON_NAME = "daemon"
"""The daemon's own value of the label `process`."""

log = logging.getLogger(__name__)


class MetricsExporter:
    """Keeps what dead processes had counted, and renders the exposition."""

    def __init__(self) -> None:
        self._ended = Totals()
        self.usage = ProcessUsage()

    def process_ended(self, snapshot: Snapshot) -> None:
        self._ended.add(snapshot)

    def totals(self, view: InstanceView) -> Totals:
        totals = self._ended.copy()
        for child in view.children.values():
            if child.last_snapshot is not None:
                totals.add(child.last_snapshot)
        totals.add_sockets(DAEMON_NAME, view.sockets)
        return totals

    def render(self, view: InstanceView) -> bytes:
        families = _Families()
        totals = self.totals(view)
        for (name, labels), value in totals.counters.items():
            families.add_counter(name, labels, value)
        for (name, labels), histogram in totals.histograms.items():
            families.add_histogram(name, labels, histogram)
        for (name, labels), value in _gauge_sums(view.children.values()).items():
            families.add_gauge(name, labels, value)
        families.add_gauge(catalog.INSTANCE_READY.name, (), float(view.state == "ready"))
        families.add_gauge(catalog.INSTANCE_UPTIME_SECONDS.name, (), view.now - view.started_at)
        for child in view.children.values():
            _add_child(families, child, view.now)
            self._add_usage(families, child.name, child.process.pid if child.process else None)
        families.add_gauge(catalog.PROCESS_UP.name, (DAEMON_NAME,), 1.0)
        families.add_gauge(
            catalog.PROCESS_UPTIME_SECONDS.name, (DAEMON_NAME,), view.now - view.started_at
        )
        self._add_usage(families, DAEMON_NAME, view.pid)
        self.usage.keep(living_pids(view))
        return generate_latest(_Exposition(families))

    def _add_usage(self, families: _Families, process: str, pid: int | None) -> None:
        usage = None if pid is None else self.usage.read(pid)
        if usage is not None:
            families.add_gauge(
                catalog.PROCESS_RESIDENT_MEMORY_BYTES.name, (process,), usage.rss_bytes
            )
            families.add_counter(catalog.PROCESS_CPU_SECONDS.name, (process,), usage.cpu_seconds)


def living_pids(view: InstanceView) -> set[int]:
    children = (child.process for child in view.children.values())
    return {view.pid, *(process.pid for process in children if process is not None)}


def _gauge_sums(children: Iterable[Child]) -> dict[tuple[str, Labels], float]:
    sums: dict[tuple[str, Labels], float] = {}
    for child in children:
        if child.snapshot is None:
            continue
        before = rank_labels(child.name)
        for name, values in child.snapshot.gauges.items():
            for labels, value in values:
                key = (name, before + labels)
                sums[key] = sums.get(key, 0.0) + value
    return sums


def _add_child(families: _Families, child: Child, now: float) -> None:
    process = (child.name,)
    families.add_gauge(catalog.PROCESS_UP.name, process, float(child.alive))
    families.add_counter(catalog.PROCESS_RESTARTS.name, process, child.restarts)
    if child.process is not None:
        families.add_gauge(
            catalog.PROCESS_UPTIME_SECONDS.name, process, now - child.process.started_at
        )
    if child.snapshot is None:
        return
    families.add_gauge(catalog.PROCESS_HEARTBEAT_AGE_SECONDS.name, process, now - child.snapshot_at)
    families.add_gauge(catalog.PROCESS_PROGRESS_AGE_SECONDS.name, process, now - child.progress_at)
    for queue in child.snapshot.queues:
        labels = (child.name, queue.name)
        families.add_gauge(catalog.QUEUE_DEPTH.name, labels, queue.depth)
        families.add_gauge(catalog.QUEUE_HIGH_WATER.name, labels, queue.high_water)
        families.add_gauge(catalog.QUEUE_CAPACITY.name, labels, queue.capacity)


_UNDESCRIBED: dict[Kind, type[Metric]] = {
    "counter": CounterMetric,
    "gauge": GaugeMetric,
    "histogram": HistogramMetric,
}


class _Exposition(Collector):
    """What prometheus_client renders."""

    def __init__(self, families: _Families) -> None:
        self._families = families

    def collect(self) -> Iterator[Family]:
        return iter(self._families)


class _Families:
    """Series grouped by metric, each with the catalog's labels and help."""

    def __init__(self) -> None:
        self._counters: dict[str, CounterMetricFamily] = {}
        self._gauges: dict[str, GaugeMetricFamily] = {}
        self._histograms: dict[str, HistogramMetricFamily] = {}
        self._labels: dict[str, tuple[Kind, int]] = {}

    def __iter__(self) -> Iterator[Family]:
        families: dict[str, Family] = {**self._counters, **self._gauges, **self._histograms}
        return (families[name] for name in sorted(families))

    def add_counter(self, name: str, labels: Labels, value: float) -> None:
        metric = self._describe(name, "counter", labels)
        if metric is None:
            return
        if name not in self._counters:
            self._counters[name] = CounterMetricFamily(
                PREFIX + name, metric.help, labels=metric.labels
            )
        self._counters[name].add_metric(labels, value)

    def add_gauge(self, name: str, labels: Labels, value: float) -> None:
        metric = self._describe(name, "gauge", labels)
        if metric is None:
            return
        if name not in self._gauges:
            self._gauges[name] = GaugeMetricFamily(PREFIX + name, metric.help, labels=metric.labels)
        self._gauges[name].add_metric(labels, value)

    def add_histogram(self, name: str, labels: Labels, value: HistogramValue) -> None:
        metric = self._describe(name, "histogram", labels)
        if metric is None:
            return
        if name not in self._histograms:
            self._histograms[name] = HistogramMetricFamily(
                PREFIX + name, metric.help, labels=metric.labels
            )
        bounds = [*(str(float(bound)) for bound in value.bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(value.counts), strict=True))
        self._histograms[name].add_metric(labels, buckets, value.total)

    def _describe(self, name: str, kind: Kind, labels: Labels) -> Metric | None:
        """The catalog's entry, or a plain one for a name that it lacks; None if this series would
        contradict the others of its name, which would spoil the whole exposition."""
        metric = BY_NAME.get(name)
        if metric is None:
            names = tuple(f"label_{i}" for i in range(1, len(labels) + 1))
            metric = _UNDESCRIBED[kind](name, "Not described yet.", names)
        if (kind, len(labels)) != self._labels.setdefault(name, (metric.kind, len(metric.labels))):
            log.error("left out a series of %s: wrong kind or number of labels", name)
            return None
        return metric
