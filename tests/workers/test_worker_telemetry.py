"""What a worker tells of itself."""

from __future__ import annotations

from transport.telemetry.metrics import MetricSet
from workers.contract import EngineInfo
from workers.engine.fake import FakeEngine, FakeEngineSettings
from workers.scheduling.scheduler import Scheduler, SchedulerCounts
from workers.telemetry import WorkerTelemetry


def engine_info() -> EngineInfo:
    return FakeEngine(
        FakeEngineSettings(
            vocab_size=100, num_pages=8, max_num_seqs=4, max_model_len=128, pipeline_depth=0,
            checking=False, step_seconds=0.0,
        )
    ).info  # fmt: skip


def test_without_a_gpu_no_gpu_memory_is_told():
    metrics = MetricSet()
    info = engine_info()
    WorkerTelemetry(metrics, info).update(Scheduler(info, 128, 4))
    assert "gpu_memory_bytes" not in metrics.read_gauges()
    assert {(q.name, q.depth, q.capacity) for q in metrics.read_queues()} == {
        ("sequences with a slot", 0, 4), ("waiting sequences", 0, 0),
    }  # fmt: skip


def test_what_the_scheduler_has_done_is_told():
    metrics = MetricSet()
    info = engine_info()
    scheduler = Scheduler(info, 128, 4)
    scheduler.counts = SchedulerCounts(1, 2, 3, 4, 5)
    WorkerTelemetry(metrics, info).update(scheduler)
    assert metrics.read_counters() == {
        "num_preemptions": [((), 1)],
        "engine_steps": [(("prompt",), 2), (("decode",), 3)],
        "prefill_tokens_computed": [((), 4)],
        "decode_tokens_computed": [((), 5)],
    }


def test_gpu_memory_is_measured_but_not_at_every_step():
    metrics = MetricSet()
    info = engine_info()
    looks = []

    def device_bytes() -> int:
        looks.append(1)
        return 123

    telemetry = WorkerTelemetry(metrics, info, device_bytes)
    scheduler = Scheduler(info, 128, 4)
    for _ in range(1000):
        telemetry.update(scheduler)
    assert metrics.read_gauges()["gpu_memory_bytes"] == [((), 123.0)]
    assert len(looks) < 100
