"""The page layout: tensors tile the row, and the fingerprint tells models apart."""

from __future__ import annotations

from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import DeepseekV3Config, Gemma3Config, LlamaConfig, PreTrainedConfig, Qwen3Config

from workers.attention.page_pool import PagePool
from workers.contract import ModelLoadError
from workers.engine.memory_plan import plan_pool
from workers.models.hf import page_layout
from workers.models.hf.page_layout import (
    DTYPE_BYTES,
    LayerShape,
    build_cache_layout,
    layer_shapes,
)
from workers.models.weights_identity import weights_identity

SHAPES = st.lists(
    st.builds(LayerShape, st.integers(1, 9), st.integers(1, 130), st.integers(1, 130)),
    min_size=1,
    max_size=5,
)


@given(SHAPES, st.sampled_from(sorted(DTYPE_BYTES)))
def test_tensors_tile_the_row(shapes: list[LayerShape], dtype: str) -> None:
    layout = build_cache_layout(shapes, dtype, LlamaConfig(), "w")
    at = 0
    for part in layout.page_tensors:
        assert part.offset == at
        at += prod(part.shape) * DTYPE_BYTES[dtype]
    assert at <= layout.page_bytes < at + 256
    assert layout.page_bytes % 256 == 0


def test_pool_views_are_the_rows_bytes() -> None:
    """What a layer writes into a page lies in that page's row at the named offset, and nowhere
    else; layers of different shape do not overlap."""
    shapes = [LayerShape(2, 6, 4), LayerShape(1, 8, 8), LayerShape(3, 5, 5)]
    layout = build_cache_layout(shapes, "float32", LlamaConfig(), "w")
    pool = PagePool(layout, 3, torch.device("cpu"))
    views = [view for pair in zip(pool.keys, pool.values, strict=True) for view in pair]
    for number, view in enumerate(views):
        view[1].fill_(number + 1)
    rows = pool.rows.numpy()
    assert not rows[0].any() and not rows[2].any()
    for number, part in enumerate(layout.page_tensors):
        span = rows[1, part.offset : part.offset + prod(part.shape) * 4].view(np.float32)
        assert (span == number + 1).all()


def test_shapes_from_configurations() -> None:
    llama = LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2)
    assert layer_shapes(llama) == (LayerShape(4, 16, 16),) * 2
    qwen = Qwen3Config(num_attention_heads=8, num_key_value_heads=2, head_dim=24)
    assert layer_shapes(qwen)[0] == LayerShape(2, 24, 24)
    nested = Gemma3Config(text_config={"num_hidden_layers": 3, "head_dim": 40})
    assert [s.key_dim for s in layer_shapes(nested)] == [40] * 3
    latent = DeepseekV3Config(num_attention_heads=4, num_hidden_layers=1)
    assert layer_shapes(latent) == (LayerShape(4, 192, 128),)


def test_missing_numbers_are_named() -> None:
    with pytest.raises(ModelLoadError, match="num_hidden_layers"):
        layer_shapes(PreTrainedConfig())


def test_fingerprint_depends_on_what_decides_the_bytes() -> None:
    shapes = [LayerShape(2, 8, 8)]
    base = build_cache_layout(shapes, "float32", LlamaConfig(), "w").fingerprint
    assert base == build_cache_layout(shapes, "float32", LlamaConfig(), "w").fingerprint
    others = {
        build_cache_layout(shapes, "bfloat16", LlamaConfig(), "w").fingerprint,
        build_cache_layout(shapes, "float32", LlamaConfig(rms_norm_eps=1e-3), "w").fingerprint,
        build_cache_layout(shapes, "float32", LlamaConfig(), "v").fingerprint,
        build_cache_layout([LayerShape(1, 16, 8)], "float32", LlamaConfig(), "w").fingerprint,
    }
    assert base not in others and len(others) == 4
    moved = LlamaConfig()
    moved._name_or_path = "/elsewhere"
    assert build_cache_layout(shapes, "float32", moved, "w").fingerprint == base


def test_fingerprint_follows_the_version_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    before = build_cache_layout([LayerShape(2, 8, 8)], "float32", LlamaConfig(), "w").fingerprint
    monkeypatch.setattr(page_layout, "COMPUTE_VERSION", page_layout.COMPUTE_VERSION + 1)
    after = build_cache_layout([LayerShape(2, 8, 8)], "float32", LlamaConfig(), "w").fingerprint
    assert after != before


def test_weights_identity_sees_content(tmp_path: Path) -> None:
    """Same shapes, other values: another identity; a copy elsewhere: the same one."""
    identities = []
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        folder = tmp_path / name
        folder.mkdir()
        save_file({"w": torch.full((300, 300), value)}, folder / "model.safetensors")
        identities.append(weights_identity(folder))
    assert identities[0] == identities[1] != identities[2]


def test_weights_identity_sees_a_change_far_behind_the_beginning(tmp_path: Path) -> None:
    identities = []
    for value in (1.0, 2.0):
        weights = torch.ones(300, 300)
        weights[250:] = value
        save_file({"w": weights}, tmp_path / "model.safetensors")
        identities.append(weights_identity(tmp_path))
    assert identities[0] != identities[1]


def test_plan_reduces_the_context_to_what_fits(caplog: pytest.LogCaptureFixture) -> None:
    plan = plan_pool(10 * 1000, 1000, 128, max_model_len=4096, max_num_seqs=4)
    assert (plan.num_pages, plan.max_model_len) == (10, 1280)
    assert "reduced from 4096 to 1280" in caplog.text
    plan = plan_pool(10**9, 1000, 128, max_model_len=300, max_num_seqs=4)
    assert (plan.num_pages, plan.max_model_len) == (12, 300)
    with pytest.raises(ModelLoadError, match="one page"):
        plan_pool(999, 1000, 128, max_model_len=300, max_num_seqs=4)
