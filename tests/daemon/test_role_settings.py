"""Every option reaches the process that it concerns, in that process's unit."""

from __future__ import annotations

import os

import msgspec
import pytest

from daemon.configuration.config import InstanceConfig
from daemon.instance import role_settings
from daemon.instance.role_settings import child_specs, make_plan
from daemon.router.settings import RouterSettings
from frontend.settings import FrontendSettings, TokenizerSettings
from workers.settings import WorkerSettings

KINDS = {
    "router": RouterSettings, "worker": WorkerSettings, "tokenizer": TokenizerSettings,
    "frontend": FrontendSettings,
}  # fmt: skip


@pytest.fixture
def told(tmp_path):
    """told(**options): the settings of each process by its name, as the process reads them."""

    def make(**options) -> dict[str, msgspec.Struct]:
        config = InstanceConfig(**{"accelerator": "cpu", **options})
        plan = make_plan(config, tmp_path, tmp_path / "run", os.getpid())
        specs = child_specs(plan, listen_fd=7, pool_fds=[8, 9])
        return {
            spec.name: msgspec.json.decode(spec.settings, type=KINDS[spec.role]) for spec in specs
        }

    return make


def test_there_is_a_process_for_each_that_was_asked_for(told):
    assert list(told(dp=2, tokenizers=2, frontends=2)) == [
        "router", "worker/0", "worker/1", "tokenizer/0", "tokenizer/1", "frontend/0", "frontend/1",
    ]  # fmt: skip


def test_the_router_is_told_its_options(told):
    router = told(
        dp=2, tokenizers=3, max_waiting=7, routing="least-loaded", max_migrations=5, retry_after=4,
        stage_timeout=6.0, start_timeout=8.0,
    )["router"]  # fmt: skip
    assert (router.workers, router.tokenizers, router.max_waiting) == (2, 3, 7)
    assert (router.routing, router.max_migrations, router.retry_after_seconds) == (
        "least-loaded", 5, 4,
    )  # fmt: skip
    assert (router.stage_seconds, router.start_seconds) == (6.0, 8.0)


def test_a_frontend_is_told_its_options(told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    frontend = told(
        served_model_name="m", max_body_mb=1.5, body_buffer_mb=2.5,
        max_header_kib=2, body_seconds=3.0, keep_alive_seconds=4, max_choices=5, stream_high_water_kib=6,
        slow_reader_seconds=7.0,
        host="::1", cors_origin=("http://a", "http://b:1"), retry_after=8, drain_timeout=9.0,
        sampling_defaults="openai", allow_priority=True,
    )["frontend/0"]  # fmt: skip
    assert (frontend.listen_fd, frontend.model_dir, frontend.model_name) == (7, str(tmp_path), "m")
    assert (frontend.host, frontend.cors_origin) == ("::1", ("http://a", "http://b:1"))
    assert (frontend.max_body_bytes, frontend.max_header_bytes) == (1_500_000, 2048)
    assert frontend.body_buffer_bytes == 2_500_000
    assert (frontend.body_seconds, frontend.keep_alive_seconds, frontend.max_choices) == (3.0, 4, 5)
    assert (frontend.stream_high_water_bytes, frontend.slow_reader_seconds) == (6144, 7.0)
    assert (frontend.retry_after_seconds, frontend.drain_seconds) == (8, 9.0)
    assert frontend.sampling_defaults.temperature == 1.0
    assert frontend.allow_priority


def test_a_worker_is_told_its_options(told, tmp_path):
    worker = told(
        dp=2, engine="fake", fake_step_ms=20.0, dtype="bfloat16", load_format="dummy",
        hf_overrides='{"num_hidden_layers": 2}', max_model_len=3, max_num_seqs=4,
        max_batched_tokens=5, prefill_any_interval=6, kv_cache_gb=7.0, kv_dtype="bf16",
        yoco_keep_tokens=8, deterministic=True, gpu_memory_utilization=0.5, hicache_size_gb=1.0,
        hicache_state_slots=9, hicache_copy="kernel",
    )["worker/1"]  # fmt: skip
    engine = worker.engine
    assert (worker.rank, worker.prefill_any_interval, worker.hicache_copy) == (1, 6, "kernel")
    assert (worker.hicache_fd, worker.hicache_bytes, worker.hicache_states) == (9, 1 << 30, 9)
    assert (engine.kind, engine.fake_step_seconds, engine.model_dir) == (
        "fake",
        0.02,
        str(tmp_path),
    )
    assert (engine.dtype, engine.load_format, engine.kv_dtype) == ("bfloat16", "dummy", "bf16")
    assert engine.hf_overrides == {"num_hidden_layers": 2}
    assert (engine.max_model_len, engine.max_num_seqs, engine.max_batched_tokens) == (3, 4, 5)
    assert (engine.kv_cache_gb, engine.gpu_memory_utilization) == (7.0, 0.5)
    assert (engine.keep_tokens, engine.deterministic, engine.stores_prefixes) == (8, True, True)


@pytest.mark.parametrize(("accelerator", "wanted"), [("cpu", (32, 512)), ("nvidia", (256, 8192))])
def test_what_is_left_open_depends_on_the_device(told, monkeypatch, accelerator, wanted):
    monkeypatch.setattr(role_settings, "nvidia_devices", lambda: ["3"])
    engine = told(accelerator=accelerator)["worker/0"].engine
    assert (engine.max_num_seqs, engine.max_batched_tokens) == wanted
    assert engine.accelerator == accelerator


def test_all_share_one_configuration_and_one_daemon(told):
    settings = told(instance="x", log_level="warning", heartbeat_seconds=0.25).values()
    processes = [one.process for one in settings]
    assert {(p.instance, p.log_level, p.heartbeat_seconds, p.parent_pid) for p in processes} == {
        ("x", "warning", 0.25, os.getpid())
    }
    assert len({p.config_hash for p in processes}) == 1
    assert len({p.name for p in processes}) == len(processes)
