"""What the router counts."""

from __future__ import annotations

from collections import Counter as CountOf
from collections.abc import Iterable, Mapping

from daemon.router.admission import Admission
from daemon.router.generation import Generation, Stage
from daemon.router.settings import RouterSettings
from transport.ids import ProcessName
from transport.telemetry import catalog
from transport.telemetry.metrics import Counter, MetricSet, QueueGauge

STAGES: tuple[Stage, ...] = ("received", "tokenizing", "queued", "running")


class RouterMetrics:
    """Handles of the router's metrics."""

    def __init__(self, metrics: MetricSet, settings: RouterSettings) -> None:
        self._metrics = metrics
        self._outstanding: dict[tuple[str, ProcessName], QueueGauge] = {}
        self._stages = {stage: metrics.gauge(catalog.ROUTER_REQUESTS, stage) for stage in STAGES}
        self._waiting = metrics.queue("waiting requests", settings.max_waiting)
        self._waiting_choices = metrics.queue("waiting choices", settings.max_waiting_choices)
        self._waiting_bytes = metrics.queue("waiting prompt bytes", settings.max_waiting_bytes)
        self.queue_seconds = metrics.histogram(catalog.QUEUE_TIME_SECONDS)
        self.render_seconds = metrics.histogram(catalog.TOKENIZER_RENDER_SECONDS)
        self.encode_seconds = metrics.histogram(catalog.TOKENIZER_ENCODE_SECONDS)
        self.migrations = metrics.counter(catalog.REQUEST_MIGRATIONS)
        self.affinity_passed_over = metrics.counter(catalog.ROUTING_AFFINITY_PASSED_OVER)

    def update_waiting(self, admission: Admission) -> None:
        self._waiting.set(admission.num_waiting)
        self._waiting_choices.set(admission.waiting_choices)
        self._waiting_bytes.set(admission.waiting_bytes)

    def rejections(self, reason: str) -> Counter:
        """Requests refused at admission; `reason` is one of the router's own few codes."""
        return self._metrics.counter(catalog.ADMISSION_REJECTIONS, reason)

    def prompts_at(self, tokenizer: ProcessName, count: int) -> None:
        self._set_outstanding("prompts", tokenizer, count)

    def choices_at(self, worker: ProcessName, count: int) -> None:
        self._set_outstanding("choices", worker, count)

    def update_outstanding(
        self, prompts: Mapping[ProcessName, int], choices: Mapping[ProcessName, int]
    ) -> None:
        """What the peers have now; those not named are gone and have nothing."""
        for key, gauge in self._outstanding.items():
            what, peer = key
            gauge.set((prompts if what == "prompts" else choices).get(peer, 0))

    def _set_outstanding(self, what: str, peer: ProcessName, count: int) -> None:
        gauge = self._outstanding.get((what, peer))
        if gauge is None:
            # The waiting ones among them count against --max-waiting, the others hold slots.
            gauge = self._metrics.queue(f"{what} at {peer}", 0)
            self._outstanding[what, peer] = gauge
        gauge.set(count)

    def update(self, generations: Iterable[Generation]) -> None:
        counts = CountOf(generation.stage for generation in generations)
        for stage, gauge in self._stages.items():
            gauge.set(counts[stage])
