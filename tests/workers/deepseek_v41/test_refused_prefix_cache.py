"""A prefix cache that cannot be had is refused before the weights are loaded."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.engines import engine_settings
from transport.child import ProcessSettings
from transport.ids import ProcessName
from workers import prefix_cache
from workers.contract import ModelLoadError
from workers.models.deepseek_v41.loading import loader
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


def create(segment, *, keep_tokens=24, **changes):
    engine = engine_settings(
        TINY, max_model_len=512, keep_tokens=keep_tokens, stores_prefixes=segment is not None
    )
    values = dict(
        process=ProcessSettings(ProcessName("worker/0"), "worker", "test", "/run", os.getpid(), "hash"),
        rank=0, engine=engine, prefill_any_interval=1, hicache_fd=segment,
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
    monkeypatch.setattr(loader, "_load_parts", None)  # not to be called
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
