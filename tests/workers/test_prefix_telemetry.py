"""What is told of the prefix cache, from the start on."""

from __future__ import annotations

from hicache.outcomes import MissReason, SkipReason
from transport.telemetry import MetricSet
from workers.prefix_telemetry import PrefixTelemetry


def labels_of(metrics: MetricSet, name: str) -> dict[str, float]:
    return {labels[0]: value for labels, value in metrics.read_counters()[name]}


def test_every_reason_and_direction_is_there_before_anything_happens():
    metrics = MetricSet()
    PrefixTelemetry(metrics, 128)
    assert labels_of(metrics, "hicache_misses") == {reason.value: 0 for reason in MissReason}
    assert labels_of(metrics, "hicache_skipped_stores") == {r.value: 0 for r in SkipReason}
    assert labels_of(metrics, "hicache_copied_bytes") == {"up": 0, "down": 0}
    assert labels_of(metrics, "hicache_copy_seconds") == {"up": 0, "down": 0}


def test_what_happened_is_told_by_reason(make_rank):
    metrics = MetricSet()
    telemetry = PrefixTelemetry(metrics, 8)
    rank = make_rank(5, 11)
    rank.copies.refused = {"store_pages"}
    rank.add(0, [1] * 40, 1)
    rank.run()
    telemetry.update(rank.cache.stats(), rank.transfers.counts)
    assert labels_of(metrics, "hicache_misses")[MissReason.NO_PREFIX.value] == 1
    assert labels_of(metrics, "hicache_skipped_stores")[SkipReason.COPY_FAILED.value] == 1


def test_a_miss_names_its_request(make_rank):
    rank = make_rank()
    rank.add(7, [1] * 40, 1)
    rank.run()
    assert [miss.request_id for miss in rank.cache.recent_misses()] == ["r7"]
