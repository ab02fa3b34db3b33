"""Bytes of pages and states: the released model's figures, and rows without overlap."""

from dataclasses import replace
from itertools import pairwise
from math import prod

import pytest

from workers.models.deepseek_v41.config.layer_cut import cut_layers
from workers.models.deepseek_v41.config.model_config import ModelConfig, Quantization, RopeScaling
from workers.models.deepseek_v41.layout import cache_layout
from workers.models.deepseek_v41.layout.cache_layout import build_cache_layout
from workers.models.deepseek_v41.layout.row_layout import build_row_layout

KEEP = 140
RELEASED = ModelConfig(
    vocab_size=129280, hidden_size=5120, num_hidden_layers=40, max_position_embeddings=1048576,
    rms_norm_eps=1e-20, num_attention_heads=64, head_dim=512, qk_rope_head_dim=64,
    q_lora_rank=1280, o_groups=8, o_lora_rank=1024, sliding_window=128, rope_theta=10000,
    compress_rope_theta=160000, rope_scaling=RopeScaling(16, 32, 1, 65536),
    compress_ratios=(0, 0, *(2,) * 18, *(1,) * 20), kv_source_layer_ids=(2, 8, 14, 20),
    index_source_layer_ids=(2, 8, 14, 20, 24, 28, 32, 36), index_n_heads=32, index_head_dim=128,
    index_topk=512, n_routed_experts=384, num_experts_per_tok=6, moe_intermediate_size=2304,
    routed_scaling_factor=1.5, swiglu_limit=10, hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6,
    engram_layer_ids=(1, 14), engram_num_embeddings=(384006168, 384016682),
    engram_vocab_size=16000000, engram_n_heads=8, engram_head_dim=256, engram_max_ngram_size=4,
    engram_pad_token_id=2, engram_compressed_vocab_size=99092, candidate_source_layer_id=20,
    candidate_topk_blocks=2048, candidate_block_size=8, quantization=Quantization(),
)  # fmt: skip


def test_the_compact_formats_take_the_published_number_of_bytes():
    layout = build_row_layout(RELEASED, "compact", KEEP, store_anchors=False)
    assert layout.page_bytes == 114048
    assert layout.stored_state_bytes == 1415040
    assert layout.records.main == 288
    assert layout.records.index_data + layout.records.index_scales == 68
    assert layout.records.window == 528
    assert layout.ring_bytes(134) == 70752
    assert set(layout.tail_rings.values()) == {7}
    tails = [t for t in layout.state_tensors if t.dtype == "float32"]
    assert sum(prod(t.shape) * 4 for t in tails) == 86016
    assert layout.state_bytes == 2762 * 1056  # 40 rings and the tails, rounded up
    assert layout.state_bytes - (40 * 70752 + 86016) < 1056


@pytest.mark.parametrize(
    ("layers", "entries", "page_bytes", "encoder_layers"),
    [(18, 2 * 64 + 128, 92_160, 9), (4, 64 + 128, 69_120, 3)],
)
def test_a_cut_model_takes_the_bytes_of_the_layers_that_are_left(
    layers, entries, page_bytes, encoder_layers
):
    layout = build_row_layout(cut_layers(RELEASED, layers), "compact", KEEP, store_anchors=False)
    assert layout.page_bytes == page_bytes
    assert 0 <= page_bytes - entries * (68 + 288) < 1152  # rounded up
    assert layout.stored_state_bytes == encoder_layers * 70752


@pytest.mark.parametrize(("kv_format", "size"), [("bfloat16", 2), ("float32", 4)])
def test_plain_formats_take_their_numbers(kv_format, size):
    layout = build_row_layout(RELEASED, kv_format, KEEP, store_anchors=False)
    entries = 3 * 64 + 128
    assert layout.page_bytes == entries * (512 + 128) * size
    assert layout.stored_state_bytes == 20 * 134 * 512 * size


def test_rings_that_store_anchors_are_longer_but_what_is_stored_is_not():
    short = build_row_layout(RELEASED, "compact", KEEP, store_anchors=False)
    long = build_row_layout(RELEASED, "compact", KEEP, store_anchors=True)
    assert (long.encoder_ring, long.decoder_ring, long.stored_ring) == (402, 134, 134)
    assert long.stored_state_bytes == short.stored_state_bytes
    assert long.page_bytes == short.page_bytes


def test_without_bounded_replay_a_stored_state_holds_all_windows():
    layout = build_row_layout(RELEASED, "compact", 0, store_anchors=True)
    assert layout.stored_state_bytes == 40 * 70752
    assert layout.decoder_ring == layout.encoder_ring


@pytest.mark.parametrize("kv_format", ["compact", "bfloat16", "float32"])
@pytest.mark.parametrize("config", [RELEASED, replace(RELEASED, sliding_window=77)])
def test_tensors_lie_in_their_row_one_after_the_other(config, kv_format):
    layout = build_row_layout(config, kv_format, KEEP, store_anchors=True)
    sizes = {"uint8": 1, "bfloat16": 2, "float32": 4}
    for tensors, total in (
        (layout.page_tensors, layout.page_bytes),
        (layout.state_tensors, layout.state_bytes),
    ):
        ends = [t.offset + prod(t.shape) * sizes[t.dtype] for t in tensors]
        for end, following in pairwise(zip(ends, tensors, strict=True)):
            assert end[0] <= following[1].offset
        assert ends[-1] <= total
    names = [t.name for t in layout.page_tensors]
    assert [n for n in names if "index_key_scales" not in n] == [
        f"layers.{source}.{part}" for source in (2, 8, 14, 20) for part in ("index_keys", "main_kv")
    ]
    # What a prefix cache keeps comes first: the encoder's windows.
    first = layout.state_tensors[:20]
    assert [t.name for t in first] == [f"layers.{i}.window_kv" for i in range(20)]


def fingerprint(config=RELEASED, kv_format="compact", keep=KEEP, identity="w", **rings):
    layout = build_row_layout(config, kv_format, keep, **{"store_anchors": False, **rings})
    return build_cache_layout(config, layout, keep, "bfloat16", identity).fingerprint


def test_the_fingerprint_tells_apart_what_must_not_be_mixed():
    different = [
        fingerprint(),
        fingerprint(kv_format="bfloat16"),
        fingerprint(keep=0),
        fingerprint(keep=150),
        fingerprint(identity="other weights"),
        fingerprint(replace(RELEASED, index_topk=256)),
    ]
    assert len(set(different)) == len(different)
    # Longer rings hold the same rows.
    assert fingerprint(store_anchors=True) == fingerprint()


def test_the_fingerprint_follows_the_version_of_the_code(monkeypatch):
    before = fingerprint()
    monkeypatch.setattr(cache_layout, "COMPUTE_VERSION", cache_layout.COMPUTE_VERSION + 1)
    assert fingerprint() != before


def test_the_cache_layout_says_what_a_prefix_cache_needs():
    layout = build_row_layout(RELEASED, "compact", KEEP, store_anchors=True)
    described = build_cache_layout(RELEASED, layout, KEEP, "bfloat16", "w")
    assert (described.page_bytes, described.stored_state_bytes) == (114048, 1415040)
    assert (described.replay_tokens, described.keep_tokens) == (KEEP, KEEP)
    assert described.state_bytes == layout.state_bytes
    whole = build_row_layout(RELEASED, "compact", 0, store_anchors=True)
    described = build_cache_layout(RELEASED, whole, 0, "bfloat16", "w")
    assert (described.replay_tokens, described.keep_tokens) == (1, 0)
