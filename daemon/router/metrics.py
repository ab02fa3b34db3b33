"""What the router counts."""

from __future__ import annotations

from collections import Counter as CountOf
from collections.abc import Iterable

from daemon.router.request import Request, Stage
from transport.telemetry import Counter, MetricSet

STAGES: tuple[Stage, ...] = ("received", "tokenizing", "queued", "running")


class RouterMetrics:
    """Handles of the router's metrics."""

    def __init__(self, metrics: MetricSet, max_waiting: int) -> None:
        self._metrics = metrics
        self._stages = {stage: metrics.gauge("router_requests", stage) for stage in STAGES}
        self.waiting = metrics.queue("waiting requests", max_waiting)
        self.queue_seconds = metrics.histogram("queue_time_seconds")
        self.render_seconds = metrics.histogram("tokenizer_render_seconds")
        self.encode_seconds = metrics.histogram("tokenizer_encode_seconds")
        self.migrations = metrics.counter("request_migrations")
        self.affinity_passed_over = metrics.counter("routing_affinity_passed_over")

    def rejections(self, reason: str) -> Counter:
        """Requests refused at admission; `reason` is one of the router's own few codes."""
        return self._metrics.counter("admission_rejections", reason)

    def update(self, requests: Iterable[Request]) -> None:
        """Count the live requests by stage."""
        counts = CountOf(request.stage for request in requests)
        for stage, gauge in self._stages.items():
            gauge.set(counts[stage])
        self.waiting.set(sum(counts[stage] for stage in STAGES[:3]))
