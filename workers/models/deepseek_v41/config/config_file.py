"""Reads a `ModelConfig` from a checkpoint's `config.json`, and refuses what it does not understand.

Two spellings are read: the published one (`text_config` within a multimodal configuration) and the
flat one of the checkpoint's own `inference/config.json`. A file becomes a flat table of settings under
published names with dots (`text_config.rope_scaling.factor`), overrides are laid over it, and the types
and limits of `ModelConfig` decode what is left.
"""

from __future__ import annotations

import re
from dataclasses import fields
from typing import TYPE_CHECKING, Final

import msgspec

from transport.model_files import GENERATION_CONFIG, MODEL_CONFIG, read_object
from workers.contract import ModelLoadError
from workers.models.deepseek_v41.config.layer_cut import cut_layers
from workers.models.deepseek_v41.config.model_config import ModelConfig, Quantization, RopeScaling

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

MODEL_TYPE: Final = "deepseek_v41"

_TEXT: Final = "text_config."
_ROPE: Final = "text_config.rope_scaling."
_QUANTIZATION: Final = "quantization_config."

_ALIASES: Final = {
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
    "rope_factor": "rope_scaling.factor",
    "original_seq_len": "rope_scaling.original_max_position_embeddings",
    "beta_fast": "rope_scaling.beta_fast",
    "beta_slow": "rope_scaling.beta_slow",
    "rope_scaling.type": "rope_scaling.rope_type",
}
"""Names that stand for names in `text_config`."""

_FIXED: Final[Mapping[str, object]] = {
    "model_type": MODEL_TYPE,
    "tie_word_embeddings": False,
    "text_config.model_type": "deepseek_v41_text",
    "text_config.num_key_value_heads": 1,
    "text_config.n_shared_experts": 1,
    "text_config.scoring_func": "sqrtsoftplus",
    "text_config.topk_method": "noaux_tc",
    "text_config.norm_topk_prob": True,
    "text_config.hidden_act": "silu",
    "text_config.attention_bias": False,
    "text_config.tie_word_embeddings": False,
    "text_config.rope_scaling.rope_type": "yarn",
    "quantization_config.quant_method": "fp8",
    "quantization_config.activation_scheme": "dynamic",
    "quantization_config.scale_fmt": "ue8m0",
    "quantization_config.expert_dtype": "fp4",
}
"""What the forward pass takes for granted: any other value is a model that it does not compute."""

_TOP: Final[tuple[str, ...]] = ("dtype", "bos_token_id", "image_token_id", "eos_token_id")
_DRAFT_LAYERS: Final = "text_config.num_nextn_predict_layers"
_KNOWN: Final = {
    *_FIXED,
    *_TOP,
    _DRAFT_LAYERS,
    *(_TEXT + spec.name for spec in fields(ModelConfig)),
    *(_ROPE + spec.name for spec in fields(RopeScaling)),
    *(_QUANTIZATION + spec.name for spec in fields(Quantization)),
} - {_TEXT + name for name in (*_TOP, "eos_token_ids", "rope_scaling", "quantization")}

# Without a meaning for generation: training, bookkeeping of the libraries that wrote the file,
# sizes that a server sets itself, and the draft model.
_IGNORED_TOP: Final = frozenset(
    {
        *("architectures", "auto_map", "pad_token_id", "transformers_version", "vision_config"),
        "_name_or_path",
    }
)
_IGNORED_TEXT: Final = frozenset(
    {
        *("architectures", "attention_dropout", "bos_token_id", "dtype", "eos_token_id"),
        *("initializer_range", "max_batch_size", "max_seq_len", "pad_token_id", "torch_dtype"),
        *("transformers_version", "use_cache"),
    }
)
_DRAFT_PREFIX: Final = "dspark_"
_DTYPE_ALIASES: Final = {
    "fp8": "bfloat16",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
}

Settings = dict[str, object]
"""Keyed by published name, with dots."""


def read_config(model_dir: Path, overrides: Mapping[str, object] | None = None) -> ModelConfig:
    """Read the configuration in `model_dir` and merge `overrides` over it.

    Args:
        overrides: published or flat names, nested or with dots (`text_config.rope_scaling.factor`).
            A name of `text_config` may stand by itself. Fewer `num_hidden_layers` without
            `compress_ratios` cut the model, see `cut_layers`; other names then describe the whole model.

    Raises:
        ModelError: the file is missing or no JSON object; or a key is unknown, missing, of the
            wrong type, or has a value that this model does not support.
    """
    path = model_dir / MODEL_CONFIG
    if not path.is_file():
        raise ModelLoadError(
            f"{path} does not exist; give the directory of a DeepSeek-V4.1 checkpoint."
        )
    tree = read_object(path)
    eos = read_object(model_dir / GENERATION_CONFIG).get("eos_token_id")
    try:
        return parse_config(tree if eos is None else {**tree, "eos_token_id": eos}, overrides)
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from error


def parse_config(
    tree: Mapping[str, object], overrides: Mapping[str, object] | None = None
) -> ModelConfig:
    whole, changes = _settings(tree), _settings(overrides or {})
    layers = changes.get("text_config.num_hidden_layers")
    all_layers = whole.get("text_config.num_hidden_layers")
    is_spelt_out = "text_config.compress_ratios" in changes
    if type(layers) is int and type(all_layers) is int and layers < all_layers and not is_spelt_out:
        del changes["text_config.num_hidden_layers"]
        return cut_layers(_build({**whole, **changes}), layers)
    return _build({**whole, **changes})


def _settings(tree: Mapping[str, object]) -> Settings:
    settings: Settings = {}
    for path, value in _leaves(tree, ""):
        name = _published_name(path)
        if name is None:
            continue
        if name not in _KNOWN:
            raise ModelLoadError(
                f"{path} is not a setting that this implementation of DeepSeek-V4.1 knows; "
                "it might change what the model computes, so the checkpoint is refused."
            )
        if settings.setdefault(name, value) != value:
            raise ModelLoadError(
                f"{path} is {value!r}, but the same setting is {settings[name]!r} under another name."
            )
    return settings


def _leaves(tree: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        path = prefix + key
        if path in _IGNORED_TOP:
            continue
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}.")
        elif path in ("text_config", "rope_scaling", _ROPE[:-1]):
            raise ModelLoadError(f"{path} must be a JSON object, but is {value!r}.")
        elif path != "quantization_config" or value is not None:
            yield path, value


def _published_name(path: str) -> str | None:
    if path == "torch_dtype":
        return "dtype"
    if path in _KNOWN or path.startswith(_QUANTIZATION):
        return path
    if _QUANTIZATION + path in _KNOWN:
        return _QUANTIZATION + path
    name = path.removeprefix(_TEXT)
    first = name.partition(".")[0]
    if first in _IGNORED_TEXT or first.startswith(_DRAFT_PREFIX):
        return None  # it means nothing here
    return _TEXT + _ALIASES.get(name, name)


def _build(settings: Settings) -> ModelConfig:
    for name, expected in _FIXED.items():
        value = settings.get(name, expected)
        if type(value) is not type(expected) or value != expected:
            raise ModelLoadError(f"{name} is {value!r}, but only {expected!r} is implemented.")
    text, rope, quantization = (
        {
            name.removeprefix(prefix): value
            for name, value in settings.items()
            if name.startswith(prefix) and name not in _FIXED
        }
        for prefix in (_TEXT, _ROPE, _QUANTIZATION)
    )
    top = {name: settings[name] for name in _TOP if name in settings}
    values: Settings = {**text, **top, "rope_scaling": rope}
    dtype, eos = top.get("dtype"), values.pop("eos_token_id", None)
    if isinstance(dtype, str):
        values["dtype"] = _DTYPE_ALIASES.get(dtype, dtype)
    if dtype == "fp8" or any(name.startswith(_QUANTIZATION) for name in settings):
        values["quantization"] = quantization
    if eos is not None:
        values["eos_token_ids"] = eos if isinstance(eos, list) else [eos]
    drafts, ratios = values.pop("num_nextn_predict_layers", 0), values.get("compress_ratios")
    layers = values.get("num_hidden_layers")
    if type(drafts) is not int:
        raise ModelLoadError(f"{_DRAFT_LAYERS} is {drafts!r}, but must be a whole number.")
    if isinstance(ratios, list) and type(layers) is int and len(ratios) == layers + drafts:
        values["compress_ratios"] = ratios[:layers]
    source = values.get("candidate_source_layer_id")
    if type(source) is int and source < 0:
        values["candidate_source_layer_id"] = None
    try:
        return msgspec.convert(values, ModelConfig)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), settings) from error


def _refusal(error: str, settings: Settings) -> ModelLoadError:
    """Rephrase a msgspec message such as "Expected `int`, got `str` - at `$.rope_scaling.factor`"."""
    what, _, place = error.partition(" - at `$.")
    field = re.sub(r"\[.*|`$", "", place)
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", what):
        field = f"{field}.{missing[1]}".lstrip(".")
    field = field.replace("quantization.", _QUANTIZATION).replace("eos_token_ids", "eos_token_id")
    name = field if field in _TOP or field.startswith(_QUANTIZATION) else _TEXT + field
    if missing:
        return ModelLoadError(f"{name} is missing.")
    return ModelLoadError(f"{name} is {settings.get(name)!r}: {what}.")
