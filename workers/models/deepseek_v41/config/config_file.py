"""Reads a `ModelConfig` from a checkpoint's `config.json`, and refuses what it does not understand.

Two spellings are read: the published one (`text_config` within a multimodal configuration) and the
flat one of the checkpoint's own `inference/config.json`. Both are brought to the names of the
published one first, then overrides are merged in, then every key must be known.
"""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Final, TypeVar

from workers.contract import ModelLoadError
from workers.models.deepseek_v41.config.layer_cut import cut_layers
from workers.models.deepseek_v41.config.model_config import ModelConfig, Quantization, RopeScaling

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

MODEL_TYPE: Final = "deepseek_v41"

T = TypeVar("T", RopeScaling, Quantization)

_TEXT_ALIASES: Final = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "rope_head_dim": "qk_rope_head_dim",
    "norm_eps": "rms_norm_eps",
    "window_size": "sliding_window",
    "kv_source_layers": "kv_source_layer_ids",
    "index_source_layers": "index_source_layer_ids",
    "candidate_source_layer": "candidate_source_layer_id",
    "moe_inter_dim": "moe_intermediate_size",
    "n_activated_experts": "num_experts_per_tok",
    "score_func": "scoring_func",
    "route_scale": "routed_scaling_factor",
    "engram_pad_id": "engram_pad_token_id",
    "n_mtp_layers": "num_nextn_predict_layers",
}
_FLAT_ROPE: Final = {
    "rope_factor": "factor",
    "original_seq_len": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}
_ROPE_ALIASES: Final = {"type": "rope_type"}
_QUANTIZATION_KEYS: Final = frozenset(
    {"quant_method", "activation_scheme", "weight_block_size", "scale_fmt", "expert_dtype"}
)

# What the forward pass takes for granted: any other value is a model that it does not compute.
_FIXED: Final[Mapping[str, object]] = {
    "model_type": "deepseek_v41_text",
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}
_FIXED_ROPE: Final[Mapping[str, object]] = {"rope_type": "yarn"}
_FIXED_QUANTIZATION: Final[Mapping[str, object]] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
_FIXED_TOP: Final[Mapping[str, object]] = {"model_type": MODEL_TYPE, "tie_word_embeddings": False}

_TOP_KEYS: Final = frozenset(
    {"dtype", "bos_token_id", "eos_token_id", "image_token_id", *_FIXED_TOP}
)
# Without a meaning for generation: training, bookkeeping of the libraries that wrote the file,
# sizes that a server sets itself, and the draft model.
_IGNORED_TOP: Final = frozenset(
    {
        "architectures",
        "auto_map",
        "pad_token_id",
        "transformers_version",
        "vision_config",
        "_name_or_path",
    }
)
_IGNORED_TEXT: Final = frozenset(
    {
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "max_batch_size",
        "max_seq_len",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
_DRAFT_PREFIX: Final = "dspark_"
_DTYPE_ALIASES: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def read_config(model_dir: Path, overrides: Mapping[str, object] | None = None) -> ModelConfig:
    """The configuration in `model_dir`, with `overrides` merged over it.

    Args:
        overrides: published or flat names; nested, or with dots (`text_config.rope_scaling.factor`).
            A name of `text_config` may stand by itself. Fewer `num_hidden_layers` without
            `compress_ratios` cut the model, see `cut_layers`; other names then mean the whole one.

    Raises:
        ModelLoadError: the file is missing or no JSON object; a key is unknown or missing, has the
            wrong type or a value that this model does not support.
    """
    path = model_dir / "config.json"
    tree = _read_json_object(path)
    generation = model_dir / "generation_config.json"
    eos = _read_json_object(generation).get("eos_token_id") if generation.is_file() else None
    try:
        config_tree = tree if eos is None else {**tree, "eos_token_id": eos}
        return parse_config(config_tree, overrides)
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from error


def parse_config(
    tree: Mapping[str, object], overrides: Mapping[str, object] | None = None
) -> ModelConfig:
    """The configuration that `tree`, the content of a `config.json`, describes; see `read_config`."""
    sections = _sections(tree)
    if not overrides:
        return sections.build()
    changed = _sections(_expand_dots(overrides))
    count = _layers_to_keep(sections, changed)
    if count is None:
        return sections.overridden_by(changed).build()
    del changed.text["num_hidden_layers"]
    return cut_layers(sections.overridden_by(changed).build(), count)


def _layers_to_keep(sections: _Sections, changed: _Sections) -> int | None:
    """To how many layers the changes cut the model; None: they do not, or say themselves what each does."""
    whole, wanted = (s.text.get("num_hidden_layers") for s in (sections, changed))
    if type(whole) is not int or type(wanted) is not int or wanted >= whole:
        return None
    return None if "compress_ratios" in changed.text else wanted


@dataclass
class _Sections:
    """A configuration under the published names, by the object that a key belongs to."""

    top: dict[str, object] = field(default_factory=dict)
    text: dict[str, object] = field(default_factory=dict)
    rope: dict[str, object] = field(default_factory=dict)
    quantization: dict[str, object] = field(default_factory=dict)

    def overridden_by(self, other: _Sections) -> _Sections:
        return _Sections(
            top={**self.top, **other.top},
            text={**self.text, **other.text},
            rope={**self.rope, **other.rope},
            quantization={**self.quantization, **other.quantization},
        )

    def build(self) -> ModelConfig:
        _check_fixed(self.top, _FIXED_TOP, "")
        _check_fixed(self.text, _FIXED, "text_config.")
        _check_fixed(self.rope, _FIXED_ROPE, "text_config.rope_scaling.")
        _check_fixed(self.quantization, _FIXED_QUANTIZATION, "quantization_config.")
        layers = _int(self.text.get("num_hidden_layers", 0), "text_config.num_hidden_layers")
        values: dict[str, object] = {}
        for spec in fields(ModelConfig):
            if spec.name in _COMPOSED:
                continue
            where = f"text_config.{spec.name}"
            if spec.name in self.text:
                values[spec.name] = _PARSERS[str(spec.type)](self.text[spec.name], where)
            elif spec.default is MISSING:
                raise ModelLoadError(f"{where} is missing.")
        source = values.get("candidate_source_layer_id")
        if isinstance(source, int) and source < 0:
            values["candidate_source_layer_id"] = None
        values["compress_ratios"] = self._ratios(layers)
        values["rope_scaling"] = _build(RopeScaling, self.rope, "text_config.rope_scaling.")
        values |= self._top_values()
        return ModelConfig(**values)  # type: ignore[arg-type]

    def _ratios(self, layers: int) -> tuple[int, ...]:
        where = "text_config.compress_ratios"
        if "compress_ratios" not in self.text:
            raise ModelLoadError(f"{where} is missing.")
        ratios = _int_tuple(self.text["compress_ratios"], where)
        drafts = _int(
            self.text.get("num_nextn_predict_layers", 0), "text_config.num_nextn_predict_layers"
        )
        return ratios[:layers] if len(ratios) == layers + drafts else ratios

    def _top_values(self) -> dict[str, object]:
        dtype = self.top.get("dtype", "bfloat16")
        if not isinstance(dtype, str):
            raise ModelLoadError(f"dtype is {dtype!r}, but must be a name.")
        quantized = bool(self.quantization)
        if dtype == "fp8":
            dtype, quantized = "bfloat16", True
        eos = self.top.get("eos_token_id")
        eos_ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
        return {
            "dtype": _DTYPE_ALIASES.get(dtype, dtype),
            "quantization": (
                _build(Quantization, self.quantization, "quantization_config.")
                if quantized
                else None
            ),
            "bos_token_id": _optional_int(self.top.get("bos_token_id"), "bos_token_id"),
            "image_token_id": _optional_int(self.top.get("image_token_id"), "image_token_id"),
            "eos_token_ids": _int_tuple(eos_ids, "eos_token_id"),
        }


_COMPOSED: Final = frozenset(
    {
        "compress_ratios",
        "rope_scaling",
        "dtype",
        "quantization",
        "bos_token_id",
        "image_token_id",
        "eos_token_ids",
    }
)


def _sections(tree: Mapping[str, object]) -> _Sections:
    sections = _Sections()
    text = _object(tree.get("text_config", {}), "text_config")
    flat: dict[str, object] = {}
    for key, value in tree.items():
        name = "dtype" if key == "torch_dtype" else key
        if name in _TOP_KEYS:
            _put(sections.top, name, value, name)
        elif key == "quantization_config":
            if value is not None:
                _quantization_section(sections, _object(value, key))
        elif key != "text_config" and key not in _IGNORED_TOP:
            flat[key] = value
    nested_model_type = text.get("model_type")
    if nested_model_type is not None:
        sections.text["model_type"] = nested_model_type
    _text_section(sections, {k: v for k, v in text.items() if k != "model_type"}, "text_config.")
    _text_section(sections, flat, "")
    return sections


def _text_section(sections: _Sections, tree: Mapping[str, object], where: str) -> None:
    for key, value in tree.items():
        name = _TEXT_ALIASES.get(key, key)
        if name in _IGNORED_TEXT or name.startswith(_DRAFT_PREFIX):
            continue
        if key in _FLAT_ROPE:
            _put(sections.rope, _FLAT_ROPE[key], value, where + key)
        elif name == "rope_scaling":
            for part, setting in _object(value, where + key).items():
                target = _ROPE_ALIASES.get(part, part)
                if target not in _ROPE_KEYS:
                    raise _unknown(f"{where}rope_scaling.{part}")
                _put(sections.rope, target, setting, f"{where}rope_scaling.{part}")
        elif key in _QUANTIZATION_KEYS and not where:
            _put(sections.quantization, key, value, key)
        elif name in _TEXT_KEYS:
            _put(sections.text, name, value, where + key)
        else:
            raise _unknown(where + key)


def _quantization_section(sections: _Sections, tree: Mapping[str, object]) -> None:
    for key, value in tree.items():
        if key not in _QUANTIZATION_KEYS:
            raise _unknown(f"quantization_config.{key}")
        _put(sections.quantization, key, value, f"quantization_config.{key}")


_ROPE_KEYS: Final = frozenset({spec.name for spec in fields(RopeScaling)} | set(_FIXED_ROPE))
_TEXT_KEYS: Final = frozenset(
    ({spec.name for spec in fields(ModelConfig)} - _COMPOSED)
    | {"compress_ratios", "num_nextn_predict_layers"}
    | set(_FIXED)
)


def _unknown(key: str) -> ModelLoadError:
    return ModelLoadError(
        f"{key} is not a setting that this implementation of DeepSeek-V4.1 knows; "
        "it might change what the model computes, so the checkpoint is refused."
    )


def _put(target: dict[str, object], name: str, value: object, where: str) -> None:
    if name in target and target[name] != value:
        raise ModelLoadError(
            f"{where} is {value!r}, but the same setting is {target[name]!r} under another name."
        )
    target[name] = value


def _check_fixed(section: Mapping[str, object], fixed: Mapping[str, object], where: str) -> None:
    for name, expected in fixed.items():
        value = section.get(name, expected)
        if type(value) is not type(expected) or value != expected:
            raise ModelLoadError(
                f"{where}{name} is {value!r}, but only {expected!r} is implemented."
            )


def _build(kind: type[T], section: Mapping[str, object], where: str) -> T:
    values: dict[str, object] = {}
    for spec in fields(kind):
        if spec.name in section:
            values[spec.name] = _PARSERS[str(spec.type)](section[spec.name], where + spec.name)
        elif spec.default is MISSING:
            raise ModelLoadError(f"{where}{spec.name} is missing.")
    return kind(**values)  # type: ignore[arg-type]


def _expand_dots(overrides: Mapping[str, object]) -> dict[str, object]:
    """`{"a.b": 1}` to `{"a": {"b": 1}}`, at every depth; objects named twice are merged."""
    tree: dict[str, object] = {}
    for key, value in overrides.items():
        *parents, last = key.split(".")
        node = tree
        for parent in parents:
            child = node.setdefault(parent, {})
            if not isinstance(child, dict):
                raise ModelLoadError(
                    f"The override {key} goes through {parent}, which has a value."
                )
            node = child
        expanded = _expand_dots(value) if isinstance(value, dict) else value
        present = node.get(last)
        if present is None:
            node[last] = expanded
        elif isinstance(present, dict) and isinstance(expanded, dict):
            present.update(expanded)
        else:
            raise ModelLoadError(f"The override {key} is given twice, with and without parts.")
    return tree


def _read_json_object(path: Path) -> Mapping[str, object]:
    try:
        return _object(json.loads(path.read_text(encoding="utf-8")), str(path))
    except FileNotFoundError as error:
        raise ModelLoadError(
            f"{path} does not exist; give the directory of a DeepSeek-V4.1 checkpoint."
        ) from error
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}.") from error


def _object(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise ModelLoadError(f"{where} must be a JSON object, but is {value!r}.")
    return value


def _int(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelLoadError(f"{where} is {value!r}, but must be a whole number.")
    return value


def _optional_int(value: object, where: str) -> int | None:
    return None if value is None else _int(value, where)


def _float(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ModelLoadError(f"{where} is {value!r}, but must be a finite number.")
    return float(value)


def _int_tuple(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        raise ModelLoadError(f"{where} is {value!r}, but must be a list of whole numbers.")
    return tuple(_int(item, f"an entry of {where}") for item in value)


def _int_pair(value: object, where: str) -> tuple[int, ...]:
    pair = _int_tuple(value, where)
    if len(pair) != 2:
        raise ModelLoadError(f"{where} is {list(pair)}, but must hold two numbers.")
    return pair


_PARSERS: Final[Mapping[str, Callable[[object, str], object]]] = {
    "int": _int,
    "int | None": _optional_int,
    "float": _float,
    "tuple[int, ...]": _int_tuple,
    "tuple[int, int]": _int_pair,
}
