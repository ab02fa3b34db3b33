"""What is told of the prefix cache, from the start on."""

from __future__ import annotations

from hicache.cache.outcomes import MissReason, SkipReason
from hicache.manager.telemetry import PrefixTelemetry
from transport.telemetry.metrics import MetricSet


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


def test_the_seconds_of_copies_are_those_that_their_bytes_travelled(make_rank):
    """Not the time until somebody looked whether they are over, with whole steps in between."""
    rank = make_rank(5, 11, delay=6)
    for number in range(2):
        rank.add(number, [1] * 40, 3)
        rank.run()
    # Of the first prompt pages and two states, of the second one nothing more; up, pages and a state.
    one = 0.25  # what the copies of this test say of themselves
    assert rank.transfers.counts["store"].seconds == 3 * one
    assert rank.transfers.counts["load"].seconds == 2 * one
