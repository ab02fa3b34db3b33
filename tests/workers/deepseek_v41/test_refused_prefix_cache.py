"""A prefix cache that cannot be had is refused before the weights are loaded."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from transport.child import ProcessSettings
from transport.ids import ProcessName
from workers import prefix_cache
from workers.contract import ModelLoadError
from workers.models.deepseek_v41.model import engine as engine_module
from workers.run import create_engine
from workers.settings import WorkerSettings

TINY = Path(__file__).parents[2] / "data" / "v41_tiny"
LINK = SimpleNamespace(set_state=lambda *_: None)
MIB = 1 << 20


@pytest.fixture
def segment():
    fd = os.memfd_create("test")
    yield fd
    os.close(fd)


def create(segment, **changes):
    values = dict(
        process=ProcessSettings(ProcessName("worker/0"), "worker", "test", "/run", os.getpid(), "hash"),
        rank=0, engine="auto", model_dir=str(TINY), accelerator="cpu", device_index=0,
        dtype="float32", load_format="auto", max_model_len=512, max_num_seqs=4, kv_cache_gb=None,
        gpu_memory_utilization=0.9, max_batched_tokens=512, prefill_any_interval=1, num_threads=1,
        kv_dtype="auto", keep_tokens=24, deterministic=False, hf_overrides={}, hicache_fd=segment,
        hicache_bytes=8 * MIB, hicache_states=4, hicache_copy="auto",
    )  # fmt: skip
    return create_engine(WorkerSettings(**{**values, **changes}), LINK)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"keep_tokens": 0}, "--yoco-keep-tokens 0 turns off"),
        ({"hicache_states": 40_000}, r"needs 1\.\d\d GiB .* 0\.50 GiB are available"),
        ({"hicache_states": 0}, "--hicache-state-slots"),
        ({"hicache_bytes": 1000}, "no room for a page"),
    ],
)
def test_it_is_refused_before_the_weights_are_loaded(segment, monkeypatch, changes, said):
    monkeypatch.setattr(engine_module, "_load", None)  # not to be called
    monkeypatch.setattr(prefix_cache, "available_host_memory", lambda: MIB << 9)
    with pytest.raises(ModelLoadError, match=said):
        create(segment, **changes)
    assert os.fstat(segment).st_size == 0


def test_without_a_prefix_cache_bounded_replay_may_be_off():
    engine = create(None, keep_tokens=0)
    assert engine.info.layout.keep_tokens == 0
    engine.close()


def test_a_pool_that_fits_is_let_through(segment, monkeypatch):
    monkeypatch.setattr(prefix_cache, "available_host_memory", lambda: MIB << 9)
    create(segment).close()
