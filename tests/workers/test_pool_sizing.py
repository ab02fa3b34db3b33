"""How large the pools become, and what is said of those that do not fit."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from hicache.layout import CacheLayout
from tests.support.engines import engine_settings
from workers.contract import EngineError, EngineInfo, ModelLoadError
from workers.engine import pool_sizing
from workers.engine.pool_sizing import allocating_pools, size_pools
from workers.hardware import device as hardware_device
from workers.models.served_model import choose_context_length
from workers.settings import EngineSettings

CPU = torch.device("cpu")
GB = 10**9


def make_settings(**changes) -> EngineSettings:
    return engine_settings(**{"dtype": "auto", "load_format": "dummy", **changes})


def make_info(page_bytes: int = GB // 100, state_bytes: int = 0) -> EngineInfo:
    layout = CacheLayout(
        page_tokens=128, page_bytes=page_bytes, page_tensors=(), fingerprint="x",
        state_bytes=state_bytes,
    )  # fmt: skip
    return EngineInfo(
        layout, num_pages=0, max_num_seqs=4, max_model_len=1280, vocab_size=10, eos_token_ids=(),
        pipeline_depth=0, device="cpu",
    )  # fmt: skip


@pytest.fixture
def memory(monkeypatch):
    """memory(bytes): so much is free."""

    def free(amount: int) -> None:
        monkeypatch.setattr(pool_sizing, "available_host_memory", lambda: amount)
        monkeypatch.setattr(hardware_device, "available_host_memory", lambda: amount)

    return free


def size(settings: EngineSettings, info: EngineInfo) -> EngineInfo:
    return size_pools(settings, info, CPU, lambda _: pytest.fail("a CPU needs no trial"), print)


def test_what_is_asked_for_is_given_up_to_what_all_sequences_can_use(memory):
    memory(100 * GB)
    assert size(make_settings(kv_cache_gb=0.25), make_info()).num_pages == 25
    assert size(make_settings(kv_cache_gb=50), make_info()).num_pages == 40


def test_a_small_pool_shortens_the_context(memory):
    memory(100 * GB)
    sized = size(make_settings(kv_cache_gb=0.05), make_info())
    assert (sized.num_pages, sized.max_model_len) == (5, 640)


def test_unasked_it_is_a_share_of_the_free_memory(memory):
    memory(GB)
    assert size(make_settings(), make_info()).num_pages == 20
    # The states come first.
    assert size(make_settings(), make_info(state_bytes=GB // 8)).num_pages == 10


@pytest.mark.parametrize(
    ("state_bytes", "words"),
    [(0, r"The KV cache would take 0\.4 GiB"), (GB, r"states of 4 sequences would take 4\.1 GiB")],
)
def test_what_memory_cannot_hold_is_refused_with_both_sizes(memory, state_bytes, words):
    memory(GB // 4)
    with pytest.raises(
        ModelLoadError, match=rf"{words}.*this machine has 0\.2 GiB free.*--kv-cache-gb"
    ):
        size(make_settings(kv_cache_gb=1.0), make_info(state_bytes=state_bytes))


def test_what_loading_left_to_pytorchs_pool_is_free_on_a_gpu(monkeypatch):
    """Else a pool that fits would be refused after weights were unpacked."""
    free = [GB // 10, GB]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.pop(0))
    settings = make_settings(kv_cache_gb=0.4)
    info = size_pools(
        settings, make_info(), torch.device("cuda", 0), lambda _: pytest.fail("sized"), print
    )
    assert info.num_pages == 40


def test_an_allocation_that_fails_is_told_in_one_sentence(memory):
    memory(GB)
    with (
        pytest.raises(ModelLoadError, match="lower --kv-cache-gb"),
        allocating_pools(make_info(), CPU),
    ):
        np.empty(1 << 60, np.uint8)  # a MemoryError of its own kind
    with (
        pytest.raises(ModelLoadError, match="lower --kv-cache-gb"),
        allocating_pools(make_info(), CPU),
    ):
        torch.empty(1 << 60, dtype=torch.uint8)
    with pytest.raises(EngineError), allocating_pools(make_info(), CPU):
        raise EngineError("something else")


def test_a_context_length(caplog):
    assert choose_context_length(None, 300) == 300
    assert choose_context_length(None, None) == 4096
    assert choose_context_length(200, 300) == 200
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert choose_context_length(400, 300) == 400
    assert "exceeds the 300" in caplog.text
