"""A model's `ModelCosts`, from its configuration and the layout of its cache."""

from __future__ import annotations

from collections import defaultdict
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from daemon.cli.bench.engine.costs import LayerCosts, ModelCosts
from hicache.layout import CacheLayout
from workers.hardware.device import DTypeName, default_dtype
from workers.models.config_sizes import read_model_config
from workers.models.hf.loader import load_config
from workers.models.hf.page_layout import DTYPE_BYTES, layer_shapes
from workers.settings import DType

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")


def weights_dtype(model_dir: Path, dtype: DType, device: torch.device) -> DTypeName:
    """What `auto` is for the model on `device`."""
    if dtype != "auto":
        return dtype
    config = read_model_config(model_dir)
    text = config.get("text_config")
    named = (
        part.get(key)
        for part in (config, text)
        if isinstance(part, dict)
        for key in ("dtype", "torch_dtype")
    )
    name = next((name for name in named if isinstance(name, str)), "")
    return default_dtype(device, getattr(torch, name, None))


def model_costs(model_dir: Path, dtype: DTypeName, layout: CacheLayout) -> ModelCosts | None:
    """Costs of a model that `HfModel` serves with weights of `dtype`.

    Returns None where a step's bytes do not follow from the weights' sizes alone: mixtures of experts read
    those that tokens are sent to, quantised weights are smaller, and images' encoders rest.
    """
    loaded = load_config(model_dir)
    config = loaded.text
    if (
        loaded.config is not config
        or getattr(config, "quantization_config", None) is not None
        or any(getattr(config, name, None) for name in _EXPERTS)
    ):
        return None
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    weights = _linear_weights(network)
    if weights is None:
        return None
    linear, others = weights
    head = network.get_output_embeddings().weight.numel()
    return ModelCosts(
        weight_bytes=(linear + others) * DTYPE_BYTES[dtype],
        linear_parameters=linear - head,
        head_parameters=head,
        layers=_layers(config, layout),
    )


def _linear_weights(network: nn.Module) -> tuple[int, int] | None:
    """Elements of the matrices of linear layers, and of the vectors beside them. Embeddings do not count.

    Returns None if the network has matrices of another kind: what is done with them is not known.
    """
    linear, others = 0, 0
    for module in network.modules():
        if isinstance(module, nn.Embedding):
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.dim() < 2:
                others += parameter.numel()
            elif isinstance(module, nn.Linear):
                linear += parameter.numel()
            else:
                return None
    return linear, others


def _layers(config: PreTrainedConfig, layout: CacheLayout) -> tuple[LayerCosts, ...]:
    kv_bytes: defaultdict[str, int] = defaultdict(int)
    for tensor in layout.page_tensors:  # layers.0.key, layers.0.value, …
        kv_bytes[tensor.name.rpartition(".")[0]] += (
            prod(tensor.shape) // layout.page_tokens * DTYPE_BYTES[tensor.dtype]
        )
    shapes = layer_shapes(config)
    heads = config.num_attention_heads
    all_heads = [heads] * len(shapes) if isinstance(heads, int) else list(heads)
    return tuple(
        LayerCosts(kv_bytes[f"layers.{number}"], 2 * n * (shape.key_dim + shape.value_dim), window)
        for number, (n, shape, window) in enumerate(
            zip(all_heads, shapes, _windows(config, len(shapes)), strict=True)
        )
    )


def _windows(config: PreTrainedConfig, layers: int) -> list[int | None]:
    window: int | None = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if not types:
        return [window] * layers
    return [window if kind == "sliding_attention" else None for kind in types]
