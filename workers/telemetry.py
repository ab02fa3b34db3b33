"""What a worker tells of itself."""

from __future__ import annotations

import time
from collections.abc import Callable

from transport.telemetry.metrics import MetricSet
from workers.contract import EngineInfo
from workers.scheduling.scheduler import Scheduler

DEVICE_SECONDS = 1.0
"""Time between two looks at the device's memory."""


class WorkerTelemetry:
    """Gauges and counters of one rank."""

    def __init__(
        self, metrics: MetricSet, info: EngineInfo, device_bytes: Callable[[], int] | None = None
    ) -> None:
        """`device_bytes` tells how much of its GPU this process has taken; None: it uses none."""
        self._device_bytes = device_bytes
        self._device_bytes_due = 0.0
        if device_bytes is not None:
            self._device_memory = metrics.gauge("gpu_memory_bytes")
        self._running_queue = metrics.queue("sequences with a slot", info.max_num_seqs)
        self._waiting_queue = metrics.queue("waiting sequences", 0)
        self._running = metrics.gauge("num_requests_running")
        self._waiting = metrics.gauge("num_requests_waiting")
        self._usage = metrics.gauge("kv_cache_usage_perc")
        self._pages_used = metrics.gauge("kv_pages_used")
        self._pages_total = metrics.gauge("kv_pages")
        self._slots_used = metrics.gauge("sequence_slots_used")
        self._slots_total = metrics.gauge("sequence_slots")
        self._preemptions = metrics.counter("num_preemptions")
        self._prefilled = metrics.counter("prefill_tokens_computed")
        self._generated = metrics.counter("decode_tokens_computed")
        self._prompt_steps = metrics.counter("engine_steps", "prompt")
        self._decode_steps = metrics.counter("engine_steps", "decode")
        self._prompt_seconds = metrics.histogram("engine_step_seconds", "prompt")
        self._decode_seconds = metrics.histogram("engine_step_seconds", "decode")
        self._pages_total.set(info.num_pages)
        self._slots_total.set(info.max_num_seqs)

    def update(self, scheduler: Scheduler) -> None:
        self._running.set(scheduler.num_running)
        self._waiting.set(scheduler.num_waiting)
        self._running_queue.set(scheduler.num_running)
        self._waiting_queue.set(scheduler.num_waiting)
        blocks = scheduler.blocks
        self._usage.set(blocks.pages_used / blocks.num_pages)
        self._pages_used.set(blocks.pages_used)
        self._slots_used.set(blocks.slots_used)
        counts = scheduler.counts
        self._preemptions.value = counts.preemptions
        self._prefilled.value = counts.prompt_tokens
        self._generated.value = counts.generated_tokens
        self._prompt_steps.value = counts.prompt_steps
        self._decode_steps.value = counts.decode_steps
        if self._device_bytes is not None:
            self._measure_device(self._device_bytes, time.monotonic())

    def _measure_device(self, device_bytes: Callable[[], int], now: float) -> None:
        # The allocator's statistics cost more than the rest of a turn: not at every step.
        if now >= self._device_bytes_due:
            self._device_bytes_due = now + DEVICE_SECONDS
            self._device_memory.set(device_bytes())

    def observe_step(self, is_prompt: bool, seconds: float) -> None:
        (self._prompt_seconds if is_prompt else self._decode_seconds).observe(seconds)
