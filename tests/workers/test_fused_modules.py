"""Models whose modules were swapped give the logits that they gave before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from workers.kernels.layer_ops import TorchLayerOps
from workers.models.hf.attention_function import ATTENTION_NAME, register
from workers.models.hf.fused_modules import fuse_modules
from workers.models.hf.fused_stack import FusedStack, _MixingAttention, fuse_stack
from workers.models.hf.network import network_logits

COMMON = dict(
    vocab_size=211, hidden_size=64, intermediate_size=96, num_attention_heads=4,
    num_key_value_heads=2, num_hidden_layers=3, max_position_embeddings=1024, pad_token_id=0,
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip
CPU = torch.device("cpu")
STACKED: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True),
    "mistral": lambda: MistralConfig(**COMMON, sliding_window=40),
    "qwen2": lambda: Qwen2Config(**COMMON),
    "qwen3": lambda: Qwen3Config(**COMMON, head_dim=32),
}
OTHERS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gemma2": lambda: Gemma2Config(**COMMON, head_dim=16),
    "gemma3": lambda: Gemma3TextConfig(**COMMON, head_dim=16),
    "gpt_oss": lambda: GptOssConfig(
        **COMMON, head_dim=16, num_local_experts=4, num_experts_per_tok=2
    ),
    "granite": lambda: GraniteConfig(**COMMON, residual_multiplier=0.5),
    "mixtral": lambda: MixtralConfig(**COMMON, num_local_experts=4),
}


def make_network(config: PreTrainedConfig, dtype: torch.dtype) -> nn.Module:
    register()
    torch.manual_seed(3)
    network = AutoModelForCausalLM.from_config(config, dtype=dtype)
    network.set_attn_implementation(ATTENTION_NAME)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(False)
        if "norm" in name or "bias" in name:
            parameter.add_(0.3 * torch.rand_like(parameter))
    return network.eval()


def logits(network: nn.Module) -> Tensor:
    rows = torch.arange(6)
    ids, positions = (rows * 31 + 5) % 211, rows * 9
    with torch.inference_mode():
        return network_logits(network, ids[None], positions[None], _MixingAttention(), rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", STACKED)
def test_layers_of_a_llama_shape_become_one_module(name: str, dtype: torch.dtype) -> None:
    network = make_network(STACKED[name](), dtype)
    before = logits(network)
    with torch.inference_mode():
        assert fuse_stack(network, TorchLayerOps(), CPU)
    assert sum(isinstance(module, FusedStack) for module in network.modules()) == 1
    assert torch.equal(logits(network), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OTHERS)
def test_other_models_keep_their_layers(name: str, dtype: torch.dtype) -> None:
    network = make_network(OTHERS[name](), dtype)
    before = logits(network)
    with torch.inference_mode():
        assert not fuse_stack(network, TorchLayerOps(), CPU)
        assert fuse_modules(network, TorchLayerOps()) >= 2 * COMMON["num_hidden_layers"] + 1
    assert torch.equal(logits(network), before)


def test_a_layer_that_computes_something_else_is_not_swapped() -> None:
    """Its parts have the names and sizes that a Llama's have."""
    network = make_network(STACKED["llama"](), torch.float32)
    layer = network.model.layers[1]
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: 1.01 * forward(*args, **kwargs)
    before = logits(network)
    with torch.inference_mode():
        assert not fuse_stack(network, TorchLayerOps(), CPU)
    assert torch.equal(logits(network), before)


def test_weights_are_not_held_twice() -> None:
    network = make_network(STACKED["llama"](), torch.float32)
    attention = network.model.layers[0].self_attn
    with torch.inference_mode():
        assert fuse_stack(network, TorchLayerOps(), CPU)
    shared = {x.weight.untyped_storage().data_ptr() for x in (attention.q_proj, attention.v_proj)}
    assert len(shared) == 1
