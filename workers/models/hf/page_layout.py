"""What a page of the KV pool consists of, derived from a Hugging Face configuration.

A page row holds, layer by layer, K then V of `PAGE_TOKENS` consecutive tokens, token-major:
`[page_tokens, kv_heads, dim]`. Layers may differ in heads and dimensions. The row is padded to a
multiple of `ROW_ALIGNMENT` bytes so that neighbouring rows copy as one aligned run.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Final

from hicache.layout import CacheLayout, TensorSlice
from workers.contract import PAGE_TOKENS, ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedConfig

ROW_ALIGNMENT: Final = 256
DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
COMPUTE_VERSION: Final = 2
"""Enters the fingerprint. Raise it with a change of code that may change the numbers in a page of the
same model: where they lie, how they are rounded, what they are computed from. Pages of another version
are then never hit nor taken over from another instance."""

# Facts about the file or the software that wrote it, not about the model.
_VOLATILE_KEYS: Final = frozenset(
    {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"}
)


@dataclass(frozen=True)
class LayerShape:
    kv_heads: int
    key_dim: int
    value_dim: int


def layer_shapes(config: PreTrainedConfig) -> tuple[LayerShape, ...]:
    """KV geometry of every layer of a causal LM (its text part, if there are several).

    Raises:
        ModelLoadError: the configuration lacks a number that is needed.
    """
    text = config.get_text_config(decoder=True)
    layers = _required(text, "num_hidden_layers")
    heads = _per_layer(_required(text, "num_attention_heads"), layers, "num_attention_heads")
    if getattr(text, "kv_lora_rank", None):
        key_dim = _required(text, "qk_nope_head_dim") + _required(text, "qk_rope_head_dim")
        value_dim = _required(text, "v_head_dim")
        return tuple(LayerShape(h, key_dim, value_dim) for h in heads)
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None)
    if head_dim is None:
        head_dim = tuple(_required(text, "hidden_size") // h for h in heads)
    return tuple(
        LayerShape(h, d, d)
        for h, d in zip(
            _per_layer(kv_heads, layers, "num_key_value_heads"),
            _per_layer(head_dim, layers, "head_dim"),
            strict=True,
        )
    )


def build_cache_layout(
    shapes: Sequence[LayerShape], dtype: str, config: PreTrainedConfig, weights_identity: str
) -> CacheLayout:
    """Lay out a page of `PAGE_TOKENS` tokens for `shapes`, one entry per layer.

    Args:
        shapes: KV geometry by layer.
        dtype: `float32`, `bfloat16` or `float16`.
        config: enters the fingerprint.
        weights_identity: enters the fingerprint; see `weights_identity`.
    """
    size = DTYPE_BYTES[dtype]
    tensors: list[TensorSlice] = []
    offset = 0
    for layer, shape in enumerate(shapes):
        for kind, dim in (("key", shape.key_dim), ("value", shape.value_dim)):
            extent = (PAGE_TOKENS, shape.kv_heads, dim)
            tensors.append(TensorSlice(f"layers.{layer}.{kind}", offset, extent, dtype))
            offset += prod(extent) * size
    page_bytes = -(-offset // ROW_ALIGNMENT) * ROW_ALIGNMENT
    layout = CacheLayout(PAGE_TOKENS, page_bytes, tuple(tensors))
    return replace(layout, fingerprint=fingerprint(config, weights_identity, layout))


def fingerprint(config: PreTrainedConfig, identity: str, layout: CacheLayout) -> str:
    """Hex digest (128 bits) of everything that decides what the bytes of a page mean."""
    facts = {
        "version": COMPUTE_VERSION,
        "config": _without_volatile(config.to_dict()),
        "weights": identity,
        "page_bytes": layout.page_bytes,
        "page_tokens": layout.page_tokens,
        "tensors": [(t.name, t.offset, t.shape, t.dtype) for t in layout.page_tensors],
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _required(config: PreTrainedConfig, name: str) -> int:
    value = getattr(config, name, None)
    if value is None:
        raise ModelLoadError(
            f"The model configuration has no {name!r}, so the size of its KV cache is unknown; "
            "only decoder-only attention models are supported."
        )
    return int(value) if not isinstance(value, (list, tuple)) else value  # type: ignore[return-value]


def _per_layer(value: int | Sequence[int], layers: int, name: str) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * layers
    if len(value) != layers:
        raise ModelLoadError(
            f"The model configuration lists {len(value)} values of {name!r} for {layers} layers."
        )
    return tuple(value)


def _without_volatile(tree: object) -> object:
    if isinstance(tree, dict):
        return {k: _without_volatile(v) for k, v in tree.items() if k not in _VOLATILE_KEYS}
    if isinstance(tree, (list, tuple)):
        return [_without_volatile(v) for v in tree]
    return tree
