"""Reading a DeepSeek-V4.1 configuration: both spellings, overrides, and what is refused."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest

from transport.model_files import ModelError
from workers.contract import ModelLoadError
from workers.models.deepseek_v41.config.config_file import parse_config, read_config
from workers.models.deepseek_v41.config.layer_cut import cut_layers
from workers.models.deepseek_v41.config.model_config import Quantization
from workers.models.deepseek_v41.engram.hashing import hash_constants

TINY = Path(__file__).parents[2] / "data" / "v41_tiny"
QUANTISED = TINY.with_name("v41_tiny_quant")
RELEASED = TINY.with_name("v41_released")


@pytest.fixture
def tree() -> dict:
    return json.loads((TINY / "config.json").read_text())


def test_both_fixtures_are_read():
    plain, quantised = read_config(TINY), read_config(QUANTISED)
    assert plain.dtype == "float32"
    assert plain.quantization is None
    assert quantised.quantization == Quantization((32, 32))
    assert replace(quantised, dtype="float32", quantization=None) == plain
    assert plain.eos_token_ids == (1,)


def test_generation_config_has_the_last_word_on_end_tokens(tmp_path, tree):
    (tmp_path / "config.json").write_text(json.dumps(tree))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 7], "top_p": 1}')
    assert read_config(tmp_path).eos_token_ids == (1, 7)


def test_roles_of_the_released_model():
    config = read_config(RELEASED)
    assert len(config.roles) == 40
    assert config.first_decoder_layer == 20
    roles = config.roles
    assert [r.layer for r in roles if r.writes_kv] == [2, 8, 14, 20]
    assert [r.layer for r in roles if r.picks_topk] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert [r.layer for r in roles if r.picks_candidates] == [20]
    assert [r.layer for r in roles if r.filters_by_candidates] == [24, 28, 32, 36]
    assert [r.layer for r in roles if r.is_decoder] == list(range(20, 40))
    assert (roles[1].kv_source, roles[1].index_source) == (None, None)
    assert (roles[13].kv_source, roles[13].index_source) == (8, 8)
    assert (roles[31].kv_source, roles[31].index_source) == (20, 28)
    assert roles[1].has_engram and roles[14].has_engram and not roles[2].has_engram


def test_the_flat_spelling_means_the_same(tree):
    text = tree["text_config"]
    short = {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "qk_rope_head_dim": "rope_head_dim",
        "rms_norm_eps": "norm_eps",
        "sliding_window": "window_size",
        "kv_source_layer_ids": "kv_source_layers",
        "index_source_layer_ids": "index_source_layers",
        "candidate_source_layer_id": "candidate_source_layer",
        "moe_intermediate_size": "moe_inter_dim",
        "num_experts_per_tok": "n_activated_experts",
        "scoring_func": "score_func",
        "routed_scaling_factor": "route_scale",
        "engram_pad_token_id": "engram_pad_id",
        "num_nextn_predict_layers": "n_mtp_layers",
    }
    flat = {short.get(k, k): v for k, v in text.items() if k not in ("rope_scaling", "model_type")}
    flat |= {"rope_factor": 16, "original_seq_len": 64, "beta_fast": 32, "beta_slow": 1}
    flat |= {"dtype": "fp8", "scale_fmt": "ue8m0", "expert_dtype": "fp4"}
    nested = read_config(QUANTISED)
    assert parse_config(flat) == replace(
        nested, image_token_id=None, bos_token_id=None, eos_token_ids=()
    )


def test_draft_layers_are_cut_off_the_ratios(tree):
    tree["text_config"]["num_nextn_predict_layers"] = 3
    tree["text_config"]["compress_ratios"] += [0, 0, 0]
    assert parse_config(tree).compress_ratios == read_config(TINY).compress_ratios


@pytest.mark.parametrize(
    "overrides",
    [
        {"text_config": {"rope_scaling": {"factor": 8}}},
        {"text_config.rope_scaling.factor": 8},
        {"text_config": {"rope_scaling.factor": 8}},
        {"rope_factor": 8},
        {"rope_scaling": {"factor": 8}},
    ],
)
def test_an_override_reaches_one_setting_and_leaves_its_neighbours(tree, overrides):
    before = copy.deepcopy(tree)
    config = parse_config(tree, overrides)
    assert config.rope_scaling == replace(read_config(TINY).rope_scaling, factor=8.0)
    assert tree == before


def test_an_override_under_an_alias_replaces_the_published_name(tree):
    config = parse_config(tree, {"text_config.engram_pad_id": 5, "window_size": 8})
    assert (config.engram_pad_token_id, config.sliding_window) == (5, 8)


@pytest.mark.parametrize("value", [-1, None])
def test_no_candidate_source_means_no_second_level(tree, value):
    config = parse_config(tree, {"candidate_source_layer_id": value})
    assert config.candidate_source_layer_id is None
    assert not any(r.picks_candidates or r.filters_by_candidates for r in config.roles)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"text_config": {"sparse_gizmo": 1}}, "text_config.sparse_gizmo"),
        ({"gizmo": 1}, "gizmo"),
        ({"text_config.rope_scaling.mscale": 1}, "text_config.rope_scaling.mscale"),
        ({"quantization_config": {"modules_to_not_convert": []}}, "modules_to_not_convert"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.quant_method"),
        ({"quantization_config": {"expert_dtype": "int4"}}, "quantization_config.expert_dtype"),
        ({"quantization_config": {"weight_block_size": [32]}}, "weight_block_size"),
        ({"model_type": "deepseek_v4"}, "model_type"),
        ({"scoring_func": "sigmoid"}, "text_config.scoring_func"),
        ({"num_key_value_heads": 2}, "text_config.num_key_value_heads"),
        ({"n_shared_experts": True}, "text_config.n_shared_experts"),
        ({"rope_scaling": {"type": "linear"}}, "text_config.rope_scaling.rope_type"),
        ({"hidden_size": "96"}, "text_config.hidden_size"),
        ({"hidden_size": True}, "text_config.hidden_size"),
        ({"hidden_size": 96.0}, "text_config.hidden_size"),
        ({"hc_eps": "tiny"}, "text_config.hc_eps"),
        ({"rope_theta": float("inf")}, "text_config.rope_theta"),
        ({"engram_layer_ids": 1}, "text_config.engram_layer_ids"),
        ({"engram_layer_ids": [1, "3"]}, "text_config.engram_layer_ids"),
        ({"rope_scaling": 4}, "rope_scaling"),
        ({"dtype": "int8"}, "dtype"),
        ({"dtype": 16}, "dtype"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hc_eps": -1}, "hc_eps"),
        ({"num_hidden_layers": 11}, "compress_ratios has 10 entries for 11 layers"),
        ({"num_hidden_layers": 4, "compress_ratios": [0, 0, 2, 2, 1]}, "5 entries for 4 layers"),
        ({"num_hidden_layers": 1}, "num_hidden_layers is 1, .* needs at least 2"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, .* needs at least 2"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"compress_ratios": [0, 0, 4, 4, 2, 2, 1, 1, 1, 1]}, "compress_ratios"),
        ({"compress_ratios": [0, 2, 2, 2, 2, 2, 1, 1, 1, 1]}, "compress_ratios"),
        ({"compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 0]}, "compress_ratios"),
        ({"compress_ratios": [0, 0, 0, 2, 2, 2, 1, 1, 1, 1]}, "index_source_layer_ids"),
        ({"kv_source_layer_ids": []}, "kv_source_layer_ids"),
        ({"kv_source_layer_ids": [4, 2, 6]}, "kv_source_layer_ids"),
        ({"kv_source_layer_ids": [2, 4, 10]}, "kv_source_layer_ids"),
        ({"kv_source_layer_ids": [2, 3, 4, 6]}, "index_source_layer_ids"),
        ({"candidate_source_layer_id": 7}, "candidate_source_layer_id"),
        ({"candidate_source_layer_id": 4}, "candidate_source_layer_id"),
        ({"candidate_topk_blocks": 4}, "candidate_topk_blocks"),
        ({"candidate_block_size": 0}, "candidate_block_size"),
        ({"engram_num_embeddings": [606]}, "engram_num_embeddings"),
        ({"engram_max_ngram_size": 1}, "engram_max_ngram_size"),
        ({"engram_pad_token_id": 256}, "engram_pad_token_id"),
        ({"engram_layer_ids": [1, 10]}, "engram_layer_ids"),
        ({"o_groups": 3}, "o_groups"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim"),
        ({"qk_rope_head_dim": 48}, "qk_rope_head_dim"),
        ({"index_head_dim": 40}, "index_head_dim"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"hidden_size.deeper": 1, "hidden_size": 1}, "hidden_size"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(tree, overrides, named):
    with pytest.raises(ModelLoadError, match=named):
        parse_config(tree, overrides)


def test_two_names_of_one_setting_must_agree(tree):
    tree["text_config"]["dim"] = 97
    with pytest.raises(ModelLoadError, match=r"text_config\.dim"):
        parse_config(tree)


@pytest.mark.parametrize("key", ["head_dim", "compress_ratios", "hc_mult"])
def test_a_missing_setting_is_named(tree, key):
    del tree["text_config"][key]
    with pytest.raises(ModelLoadError, match=f"{key} is missing"):
        parse_config(tree)


def test_a_missing_rope_setting_is_named(tree):
    del tree["text_config"]["rope_scaling"]["beta_fast"]
    with pytest.raises(ModelLoadError, match=r"rope_scaling\.beta_fast is missing"):
        parse_config(tree)


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_a_broken_file_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(tmp_path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ModelLoadError, match=r"config\.json does not exist"):
        read_config(tmp_path)


def test_a_replay_shorter_than_the_window_is_refused():
    config = read_config(TINY)
    config.check_keep_tokens(16)
    with pytest.raises(ModelLoadError, match="yoco_keep_tokens"):
        config.check_keep_tokens(15)


@pytest.mark.parametrize(
    ("count", "ratios", "kv_sources", "index_sources", "candidates", "engram"),
    [
        (39, [0, 0] + [2] * 18 + [1] * 19, [2, 8, 14, 20], [2, 8, 14, 20, 24, 28, 32, 36], 20, [1, 14]),
        (18, [0, 0] + [2] * 7 + [1] * 9, [2, 8, 9], [2, 8, 9, 13, 17], 9, [1]),
        (6, [0, 0, 2, 1, 1, 1], [2, 3], [2, 3], 3, [1]),
        (4, [0, 0, 2, 1], [2, 3], [2, 3], 3, [1]),
        (3, [0, 0, 1], [2], [2], 2, [1]),
        (2, [0, 1], [1], [1], 1, []),
    ],
)  # fmt: skip
def test_fewer_layers_are_the_first_ones_of_both_halves(
    count, ratios, kv_sources, index_sources, candidates, engram
):
    whole, cut = read_config(RELEASED), read_config(RELEASED, {"num_hidden_layers": count})
    assert cut == replace(
        whole,
        num_hidden_layers=count,
        compress_ratios=tuple(ratios),
        kv_source_layer_ids=tuple(kv_sources),
        index_source_layer_ids=tuple(index_sources),
        candidate_source_layer_id=candidates,
        engram_layer_ids=tuple(engram),
        engram_num_embeddings=whole.engram_num_embeddings[: len(engram)],
    )
    assert any(role.is_decoder for role in cut.roles)
    assert not all(role.is_decoder for role in cut.roles)


def test_every_number_of_layers_gives_a_model_with_both_halves():
    for folder, whole in ((RELEASED, 40), (TINY, 10)):
        for count in range(2, whole):
            config = read_config(folder, {"text_config.num_hidden_layers": count})
            assert 0 < config.first_decoder_layer < count == len(config.roles)
            hash_constants(config)  # the tables that are left have the sizes that their hash needs


def test_a_cut_comes_after_the_other_overrides():
    overrides = {"num_hidden_layers": 6, "candidate_source_layer_id": -1, "hidden_size": 64}
    config = read_config(RELEASED, overrides)
    assert (config.hidden_size, config.candidate_source_layer_id) == (64, None)
    assert len(config.compress_ratios) == 6


def test_layers_that_are_spelt_out_are_not_cut(tree):
    spelt = {
        "num_hidden_layers": 3, "compress_ratios": [0, 2, 1], "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2], "candidate_source_layer_id": 2, "engram_layer_ids": [],
        "engram_num_embeddings": [],
    }  # fmt: skip
    assert parse_config(tree, spelt).compress_ratios == (0, 2, 1)


def test_an_engram_layer_after_one_that_is_cut_away_loses_its_table():
    config = read_config(RELEASED)
    tables = (*config.engram_num_embeddings, 1)
    config = replace(config, engram_layer_ids=(1, 14, 21), engram_num_embeddings=tables)
    assert cut_layers(config, 18).engram_layer_ids == (1,)


def test_a_model_without_an_encoder_may_have_one_layer():
    config = replace(
        read_config(TINY), num_hidden_layers=2, compress_ratios=(1, 1), kv_source_layer_ids=(0,),
        index_source_layer_ids=(0, 1), candidate_source_layer_id=0, engram_layer_ids=(),
        engram_num_embeddings=(),
    )  # fmt: skip
    assert cut_layers(config, 1).compress_ratios == (1,)
    with pytest.raises(ModelLoadError, match="at least 1"):
        cut_layers(config, 0)
