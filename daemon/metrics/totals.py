"""Sums of cumulative counters and histograms over processes, dead ones included."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from transport.messages.telemetry import Snapshot
from transport.telemetry import catalog
from transport.telemetry.catalog import CounterMetric, HistogramMetric
from transport.telemetry.values import HistogramValue, SocketStats

Labels = tuple[str, ...]
Key = tuple[str, Labels]
"""Name of a metric and the label values of one of its series, as exposed."""

WORKER_ROLE: Final = "worker"

log = logging.getLogger(__name__)


def rank_labels(process_name: str) -> Labels:
    """`rank`, which the daemon puts before a worker's own labels."""
    role, _, number = process_name.partition("/")
    return (number,) if role == WORKER_ROLE else ()


class Totals:
    """What has been counted so far; only grows."""

    def __init__(self) -> None:
        self.counters: dict[Key, float] = {}
        self.histograms: dict[Key, HistogramValue] = {}

    def copy(self) -> Totals:
        other = Totals()
        other.counters = dict(self.counters)
        other.histograms = dict(self.histograms)
        return other

    def add(self, snapshot: Snapshot) -> None:
        before = rank_labels(snapshot.name)
        for name, values in snapshot.counters.items():
            for labels, value in values:
                self._count((name, before + labels), value)
        for name, histograms in snapshot.histograms.items():
            for labels, histogram in histograms:
                self._merge((name, before + labels), histogram)
        self.add_sockets(snapshot.name, snapshot.sockets)

    def add_sockets(self, process: str, sockets: Sequence[SocketStats]) -> None:
        for socket in sockets:
            where = (process, socket.name)
            self._count((catalog.SOCKET_MESSAGES.name, (*where, "received")), socket.received)
            self._count((catalog.SOCKET_MESSAGES.name, (*where, "sent")), socket.sent)
            self._count((catalog.SOCKET_BYTES.name, (*where, "received")), socket.received_bytes)
            self._count((catalog.SOCKET_BYTES.name, (*where, "sent")), socket.sent_bytes)
            self._count((catalog.SOCKET_REFUSED_SENDS.name, where), socket.refused)

    def counter(self, metric: CounterMetric, *first_labels: str) -> float:
        width = len(first_labels)
        return sum(
            value
            for (found, labels), value in self.counters.items()
            if found == metric.name and labels[:width] == first_labels
        )

    def observations(self, metric: HistogramMetric) -> int:
        values = self.histograms.items()
        return sum(sum(value.counts) for (found, _), value in values if found == metric.name)

    def _count(self, key: Key, value: float) -> None:
        self.counters[key] = self.counters.get(key, 0.0) + value

    def _merge(self, key: Key, value: HistogramValue) -> None:
        known = self.histograms.get(key)
        if known is None:
            self.histograms[key] = value
        elif known.bounds == value.bounds:
            counts = tuple(a + b for a, b in zip(known.counts, value.counts, strict=True))
            self.histograms[key] = HistogramValue(value.bounds, counts, known.total + value.total)
        else:
            # One code base counts both, so this is a defect; a wrong sum would hide it.
            log.error("%s has different buckets in two processes; one is left out", key[0])
