"""Tiny random models of the families that are tested against transformers' `generate`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCAB = 211
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**COMMON),
    "qwen2": lambda: Qwen2Config(**COMMON),
    "qwen3": lambda: Qwen3Config(**COMMON, head_dim=24),
    "mistral_window": lambda: MistralConfig(**COMMON, sliding_window=40, head_dim=16),
    "mistral_long_window": lambda: MistralConfig(**COMMON, sliding_window=130, head_dim=16),
    "gemma2": lambda: Gemma2Config(
        **COMMON,
        head_dim=16,
        sliding_window=48,
        tie_word_embeddings=False,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=0.3,
        final_logit_softcapping=8.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **COMMON | {"num_hidden_layers": 3},
        head_dim=16,
        sliding_window=33,
        tie_word_embeddings=False,
        layer_types=SLIDING,
        query_pre_attn_scalar=32,
    ),
    "mixtral": lambda: MixtralConfig(**COMMON, **MOE),
    "gpt_oss": lambda: GptOssConfig(
        **COMMON | {"num_hidden_layers": 3},
        **MOE,
        head_dim=16,
        sliding_window=36,
        layer_types=SLIDING,
    ),
    "deepseek_v3": lambda: DeepseekV3Config(
        **COMMON | {"num_key_value_heads": 4},
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
}
DEVICES = [
    "cpu",
    pytest.param(
        "nvidia",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
        ],
    ),
]


def make_checkpoint(name: str, folder: Path) -> Path:
    """A tiny random model of the family `name`, the same one every time."""
    torch.manual_seed(7)
    config = CONFIGS[name]()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            if key.endswith("bias"):
                tensor.normal_()
            if key.endswith("sinks"):
                tensor.uniform_(2.0, 6.0)
    model.save_pretrained(folder)
    return folder


def make_prompt(length: int, seed: int = 2) -> list[int]:
    """Tokens that any of the families has and that end nothing."""
    return np.random.default_rng((length, seed)).integers(3, VOCAB, length).tolist()
