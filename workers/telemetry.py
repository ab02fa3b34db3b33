"""What a worker tells of itself."""

from __future__ import annotations

import time
from collections.abc import Callable

from transport.telemetry import catalog
from transport.telemetry.metrics import MetricSet
from workers.contract import EngineInfo
from workers.scheduling.scheduler import Scheduler

DEVICE_SECONDS = 1.0
"""Time between two readings of the device's memory."""


class WorkerTelemetry:
    """Gauges and counters of one rank."""

    def __init__(
        self, metrics: MetricSet, info: EngineInfo, device_bytes: Callable[[], int] | None = None
    ) -> None:
        self._metrics = metrics
        self._device_bytes = device_bytes
        self._device_bytes_due = 0.0
        self._running_queue = metrics.queue("sequences with a slot", info.max_num_seqs)
        self._waiting_queue = metrics.queue("waiting sequences", 0)
        metrics.gauge(catalog.KV_PAGES).set(info.num_pages)
        metrics.gauge(catalog.SEQUENCE_SLOTS).set(info.max_num_seqs)

    def update(self, scheduler: Scheduler) -> None:
        counter, gauge = self._metrics.counter, self._metrics.gauge
        blocks, counts = scheduler.blocks, scheduler.counts
        gauge(catalog.NUM_REQUESTS_RUNNING).set(scheduler.num_running)
        gauge(catalog.NUM_REQUESTS_WAITING).set(scheduler.num_waiting)
        self._running_queue.set(scheduler.num_running)
        self._waiting_queue.set(scheduler.num_waiting)
        gauge(catalog.KV_CACHE_USAGE_PERC).set(blocks.pages_used / blocks.num_pages)
        gauge(catalog.KV_PAGES_USED).set(blocks.pages_used)
        gauge(catalog.SEQUENCE_SLOTS_USED).set(blocks.slots_used)
        counter(catalog.NUM_PREEMPTIONS).set_total(counts.preemptions)
        counter(catalog.PREFILL_TOKENS_COMPUTED).set_total(counts.prompt_tokens)
        counter(catalog.DECODE_TOKENS_COMPUTED).set_total(counts.generated_tokens)
        counter(catalog.ENGINE_STEPS, "prompt").set_total(counts.prompt_steps)
        counter(catalog.ENGINE_STEPS, "decode").set_total(counts.decode_steps)
        self._measure_device(time.monotonic())

    def _measure_device(self, now: float) -> None:
        # The allocator's statistics cost more than the rest of a turn: not at every step.
        if self._device_bytes is not None and now >= self._device_bytes_due:
            self._device_bytes_due = now + DEVICE_SECONDS
            self._metrics.gauge(catalog.GPU_MEMORY_BYTES).set(self._device_bytes())

    def observe_step(self, is_prompt: bool, seconds: float) -> None:
        kind = "prompt" if is_prompt else "decode"
        self._metrics.histogram(catalog.ENGINE_STEP_SECONDS, kind).observe(seconds)
