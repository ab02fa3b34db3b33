"""Reads `config.json`, and refuses sizes that no model has, before anything is built from them.

A library that makes a list or a module for each of a billion layers neither ends nor says what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from transport.model_files import MODEL_CONFIG, JsonObject, read_object
from workers.contract import ModelLoadError

_LAYERS: Final = 10_000
_HEADS: Final = 1 << 16
_WIDTH: Final = 1 << 24
_EXPERTS: Final = 1 << 16
_TOKENS: Final = 1 << 31
_LARGEST: Final[Mapping[str, int]] = MappingProxyType(
    {
        **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), _LAYERS),
        **dict.fromkeys(
            ("num_attention_heads", "num_key_value_heads", "n_head", "n_heads"), _HEADS
        ),
        **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "head_dim"), _WIDTH),
        **dict.fromkeys(("intermediate_size", "n_inner", "moe_intermediate_size"), _WIDTH),
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), _EXPERTS),
        **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions", "n_ctx"), _TOKENS),
    }
)
_MAY_BE_ZERO: Final = frozenset({"num_experts", "num_local_experts", "n_routed_experts"})
_LANGUAGE_PARTS: Final = ("", "text_config.")
"""Where none of these can be zero. A tower of a model for images may be left out so."""


def read_model_config(model_dir: Path) -> JsonObject:
    """The checkpoint's `config.json`; empty if there is none.

    Raises:
        ModelError: it is no JSON object.
        ModelLoadError: it names a size that no model has.
    """
    path = model_dir / MODEL_CONFIG
    config = read_object(path)
    for part, name, value in _sizes(config, ""):
        least = 1 if part in _LANGUAGE_PARTS and name not in _MAY_BE_ZERO else 0
        if not least <= value <= _LARGEST[name]:
            raise ModelLoadError(
                f"{path} has {part}{name} {_shown(value)}, but it must be from {least} to "
                f"{_LARGEST[name]}: correct it."
            )
    return config


def _sizes(config: Mapping[str, object], part: str) -> Iterator[tuple[str, str, int]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _sizes(value, f"{part}{name}.")
        elif name in _LARGEST:
            for item in value if isinstance(value, list) else [value]:
                if type(item) is int:  # another type is refused by who reads it
                    yield part, name, item


def _shown(value: int) -> str:
    return str(value) if abs(value) < 10**20 else "of more than 20 digits"
