"""What is said to a user whose model cannot be served, and what a loaded engine reports."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
)

from tests.support import engines
from transport.messages.generate import SamplingParams
from transport.model_files import ModelError
from workers.contract import PromptChunk, StepPlan
from workers.engine.engine import ModelEngine
from workers.models.served_model import LoadObserver

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def open_engine(model_dir: Path, **changes: object) -> ModelEngine:
    values = {"dtype": "auto", "max_num_seqs": 3, "max_batched_tokens": 256}
    return engines.open_engine(model_dir, **{**values, **changes})


def refusal(model_dir: Path, **changes: object) -> str:
    with pytest.raises(ModelError) as caught:
        open_engine(model_dir, **changes)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    GenerationConfig(eos_token_id=[7, 5]).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (lambda: transformers.T5Config(num_layers=1), "encoder-decoder"),
        (lambda: transformers.BertConfig(num_hidden_layers=1, hidden_size=12), "bidirectional"),
        (lambda: transformers.MambaConfig(vocab_size=64, hidden_size=16), "linear_attention"),
        (lambda: transformers.BloomConfig(vocab_size=64, hidden_size=16, n_head=2), "attention"),
        (
            lambda: transformers.Qwen3NextConfig(**SMALL | {"num_hidden_layers": 4}),
            "linear_attention",
        ),
        (lambda: transformers.Llama4TextConfig(**SMALL), "chunked_attention"),
        (
            lambda: transformers.FalconH1Config(
                **SMALL, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16
            ),
            "falcon_h1",
        ),
        (lambda: transformers.StableLmConfig(**SMALL), "keyword arguments"),
        (lambda: transformers.Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]), "conv"),
        (transformers.ViTConfig, "ViT"),
    ],
    ids=[
        "t5",
        "bert",
        "mamba",
        "bloom",
        "qwen3_next",
        "llama4",
        "falcon_h1",
        "stablelm",
        "lfm2",
        "vit",
    ],
)
def test_models_that_need_more_are_refused(config, named: str, tmp_path: Path) -> None:
    config().save_pretrained(tmp_path)
    assert named in refusal(tmp_path, load_format="dummy")


def test_overrides_change_the_shape_and_name_what_they_do_not_know(llama_dir: Path) -> None:
    engine = open_engine(
        llama_dir, load_format="dummy", hf_overrides={"num_hidden_layers": 1, "head_dim": 8}
    )
    shapes = [part.shape for part in engine.info.layout.page_tensors]
    assert shapes == [(128, 2, 8)] * 2
    engine.close()
    said = refusal(llama_dir, load_format="dummy", hf_overrides={"num_layer": 1})
    assert "'num_layer'" in said


def test_a_compact_cache_is_refused_where_no_such_format_exists(llama_dir: Path) -> None:
    assert "--kv-dtype compact" in refusal(llama_dir, kv_dtype="compact")


def test_broken_directories_are_named(llama_dir: Path, tmp_path: Path) -> None:
    assert "no config.json" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert str(tmp_path) in refusal(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    assert "no_such_model" in refusal(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "num_hidden_layers": "many"})
    )
    assert "num_hidden_layers" in refusal(tmp_path)
    (tmp_path / "config.json").write_bytes((llama_dir / "config.json").read_bytes())
    assert "safetensors" in refusal(tmp_path)
    weights = load_file(llama_dir / "model.safetensors")
    lost = "model.layers.1.mlp.up_proj.weight"
    del weights[lost]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert lost in refusal(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors at all")
    assert str(tmp_path) in refusal(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 2.5},
        {"num_hidden_layers": 1},
        {"num_attention_heads": 3},
        {"num_attention_heads": []},
        {"num_key_value_heads": 5},
        {"head_dim": 7},
        {"hidden_size": 48},
        {"hidden_size": None},
        {"vocab_size": 95},
        {"vocab_size": 1 << 30},
        {"max_position_embeddings": -1},
        {"rope_parameters": {"rope_type": "yarn", "factor": 0}},
        {"rope_parameters": {"rope_type": []}},
        {"rope_parameters": 7},
        {"hidden_act": "no_such_act"},
        {"layer_types": ["full_attention"]},
        {"layer_types": {"a": 1}},
        {"dtype": "float7"},
        {"torch_dtype": []},
        {"quantization_config": {"quant_method": "no_such_method"}},
        {"quantization_config": 7},
        {"model_type": []},
        {"model_type": None},
        {"architectures": 7, "model_type": "llama", "rms_norm_eps": "small"},
        {"auto_map": {"AutoConfig": "code.Config"}, "model_type": "theirs"},
        {"text_config": []},
        {"eos_token_id": "</s>"},
        {"pad_token_id": 10**30},
    ],
    ids=str,
)
def test_a_configuration_unlike_the_weights_is_refused_or_works(
    llama_dir: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    """Nothing but a sentence, whatever `config.json` says."""
    shutil.copytree(llama_dir, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    try:
        open_engine(tmp_path).close()
    except ModelError as error:
        text = str(error)
        assert "\n" not in text
        assert str(tmp_path) in text or "Llama" in text or "model" in text


def test_a_head_beside_tied_embeddings_and_files_of_others_are_no_matter(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**SMALL, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    plain = open_engine(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in weights
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "consolidated.safetensors").write_bytes(b"of another format")
    (tmp_path / "pytorch_model.bin").write_bytes(b"older")
    engine = open_engine(tmp_path)
    assert engine.info.vocab_size == plain.info.vocab_size
    token = np.array([5], np.int32)
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    chunk = PromptChunk(0, 0, token, (0,), True, True, sampling, 0, 1)
    first, second = (e.launch(StepPlan(0, prompts=(chunk,))).collect() for e in (plain, engine))
    assert first.tokens.tolist() == second.tokens.tolist()


def test_a_nested_configuration_is_refused(llama_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(llama_dir, tmp_path, dirs_exist_ok=True)
    for depth in (900, 100_000):
        (tmp_path / "config.json").write_text('{"rope_parameters":' * depth + "{}" + "}" * depth)
        assert str(tmp_path / "config.json") in refusal(tmp_path)


def test_a_gpu_that_is_not_there_is_refused(llama_dir: Path) -> None:
    text = refusal(llama_dir, accelerator="nvidia", device_index=99)
    assert "GPU 99" in text and "cpu" in text


def test_engine_reports_what_it_offers(llama_dir: Path) -> None:
    lines: list[str] = []
    engine = open_engine(llama_dir, observer=LoadObserver(report=lines.append))
    info = engine.info
    assert (info.vocab_size, info.max_model_len, info.max_num_seqs) == (96, 512, 3)
    assert info.eos_token_ids == (7, 5, 2)
    assert info.num_pages == 3 * 4
    assert info.pipeline_depth == 0
    assert {t.dtype for t in info.layout.page_tensors} == {"float32"}
    assert engine.model.pages.shape == (12, info.layout.page_bytes)
    assert "float32" in lines[0] and "12 pages" in lines[-1]
    again = open_engine(llama_dir, max_num_seqs=1)
    assert again.info.layout.fingerprint == info.layout.fingerprint
    dummy = open_engine(llama_dir, load_format="dummy")
    assert dummy.info.layout.fingerprint != info.layout.fingerprint


def test_small_cache_shortens_the_context(
    llama_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    page = open_engine(llama_dir).info.layout.page_bytes
    engine = open_engine(llama_dir, kv_cache_gb=2.5 * page / 1e9)
    assert (engine.info.num_pages, engine.info.max_model_len) == (2, 256)
    assert "reduced" in caplog.text
    assert "one page" in refusal(llama_dir, kv_cache_gb=0.5 * page / 1e9)


def longrope() -> PreTrainedConfig:
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    return Phi3Config(
        **SMALL,
        initializer_range=0.3,
        original_max_position_embeddings=64,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **factors},
    )


def dynamic_rope() -> PreTrainedConfig:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    shape = {**SMALL, "max_position_embeddings": 64}
    return LlamaConfig(**shape, initializer_range=0.3, rope_parameters=rope)


@pytest.mark.parametrize("make_config", [longrope, dynamic_rope])
def test_longer_sequences_do_not_change_shorter_ones(
    tmp_path: Path, make_config: Callable[[], PreTrainedConfig]
) -> None:
    """A model with run-time rope scaling gives a short prompt the same token in any company."""
    config = make_config()
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    engine = open_engine(tmp_path, max_num_seqs=2, max_model_len=512)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=3)
    random = torch.Generator().manual_seed(3)

    def chunk(slot: int, length: int) -> PromptChunk:
        tokens = torch.randint(3, 96, (length,), generator=random).int().numpy()
        pages = (slot * 2, slot * 2 + 1)
        return PromptChunk(slot, 0, tokens, pages, True, True, sampling, 0, length)

    shorter = open_engine(tmp_path, max_model_len=400)
    assert shorter.info.layout.fingerprint != engine.info.layout.fingerprint
    short, long = chunk(0, 40), chunk(1, 200)
    logprobs = []
    for prompts in ((short,), (long, short)):
        result = engine.launch(StepPlan(0, prompts=prompts)).collect()
        logprobs.append(result.logprobs[len(prompts) - 1])
    assert logprobs[0].chosen == pytest.approx(logprobs[1].chosen, abs=1e-4)
    assert logprobs[0].top_ids.tolist() == logprobs[1].top_ids.tolist()
