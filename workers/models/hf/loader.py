"""Loads a Hugging Face causal language model from a directory, straight to the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig

from transport.model_files import GENERATION_CONFIG, MODEL_CONFIG, ModelError
from transport.wording import first_line
from workers.contract import ModelLoadError
from workers.models.hf.attention_function import ATTENTION_NAME, register
from workers.models.safetensors_header import read_header
from workers.models.weight_files import weight_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from workers.hardware.device import DTypeName
    from workers.settings import LoadFormat

_DUMMY_SEED: Final = 0
_SUPPORTED_LAYERS: Final = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True)
class LoadedConfig:
    """A checked configuration and what generation needs from it."""

    config: PreTrainedConfig
    text: PreTrainedConfig
    """The part that describes the language model. For text-only models it is `config` itself."""
    eos_token_ids: tuple[int, ...]
    max_position: int | None
    checkpoint_dtype: torch.dtype | None


def load_config(
    model_dir: Path, overrides: Mapping[str, object] = MappingProxyType({})
) -> LoadedConfig:
    """Read `config.json` and `generation_config.json`.

    Args:
        overrides: entries to replace; objects are merged into the nested configurations.

    Raises:
        ModelError: there is no configuration, it is unknown, or it describes a model that needs
            something this engine lacks.
    """
    path = model_dir / MODEL_CONFIG
    if not path.is_file():
        raise ModelLoadError(
            f"{model_dir} has no config.json; give the directory of a Hugging Face checkpoint."
        )
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
        _override(config, overrides, "")
    except ModelError:
        raise
    # Whatever a library meets in a file that anybody may have written.
    except Exception as error:
        raise ModelLoadError(f"{path} cannot be used: {_reason(error)}") from error
    text = config.get_text_config(decoder=True)
    _check_supported(config, text, model_dir)
    dtype = getattr(config, "dtype", None) or getattr(text, "dtype", None)
    return LoadedConfig(
        config=config,
        text=text,
        eos_token_ids=_eos_token_ids(model_dir, config, text),
        max_position=getattr(text, "max_position_embeddings", None),
        checkpoint_dtype=getattr(torch, dtype, None) if isinstance(dtype, str) else dtype,
    )


def _override(config: PreTrainedConfig, overrides: Mapping[str, object], path: str) -> None:
    for name, value in overrides.items():
        known = getattr(config, name, None)
        if not hasattr(config, name):
            raise ModelLoadError(
                f"--hf-overrides names {path + name!r}, which the configuration of "
                f"{config.model_type} does not have."
            )
        if isinstance(known, PreTrainedConfig) and isinstance(value, Mapping):
            _override(known, value, f"{path}{name}.")
        elif isinstance(known, Mapping) and isinstance(value, Mapping):
            setattr(config, name, {**known, **value})
        else:
            setattr(config, name, value)


def _check_supported(config: PreTrainedConfig, text: PreTrainedConfig, model_dir: Path) -> None:
    name = getattr(config, "model_type", "unknown")
    if getattr(config, "is_encoder_decoder", False):
        raise ModelLoadError(
            f"{model_dir} holds an encoder-decoder model ({name}); only decoder-only causal "
            "language models can be served."
        )
    strange = set(getattr(text, "layer_types", None) or ()) - _SUPPORTED_LAYERS
    if strange:
        raise ModelLoadError(
            f"{model_dir} ({name}) has layers of kind {', '.join(sorted(strange))}; only full and "
            "sliding-window attention layers can be served."
        )
    if getattr(text, "num_kv_shared_layers", 0):
        raise ModelLoadError(
            f"{model_dir} ({name}) shares keys and values between layers, which this engine does "
            "not implement."
        )
    if getattr(text, "use_bidirectional_attention", None):
        raise ModelLoadError(
            f"{model_dir} ({name}) attends in both directions; only causal language models can be "
            "served."
        )


def _eos_token_ids(
    model_dir: Path, config: PreTrainedConfig, text: PreTrainedConfig
) -> tuple[int, ...]:
    sources: list[object] = [getattr(c, "eos_token_id", None) for c in (config, text)]
    if (model_dir / GENERATION_CONFIG).is_file():
        try:
            generation = GenerationConfig.from_pretrained(model_dir, local_files_only=True)
        except Exception as error:  # as above
            raise ModelLoadError(
                f"{model_dir / GENERATION_CONFIG} cannot be used: {_reason(error)}"
            ) from error
        sources.insert(0, generation.eos_token_id)
    found: dict[int, None] = {}
    for source in sources:
        for token in source if isinstance(source, (list, tuple)) else [source]:
            if isinstance(token, int):
                found[token] = None
    return tuple(found)


def _reason(error: Exception) -> str:
    """Without its type many an error of a library says nothing: `KeyError: 'type'`."""
    text = first_line(error)
    is_sentence = isinstance(error, (OSError, ValueError, StrictDataclassError, RuntimeError))
    return text if is_sentence else f"{type(error).__name__}: {text}"


def load_weights(
    loaded: LoadedConfig,
    model_dir: Path,
    device: torch.device,
    dtype: DTypeName,
    load_format: LoadFormat,
) -> nn.Module:
    """Load the model in evaluation mode, with our attention function set.

    Args:
        load_format: `auto` reads the safetensors files; `dummy` gives random weights of the real
            shapes, always the same ones.

    Raises:
        ModelLoadError: it is no causal LM, or its weights are missing, incomplete or too big.
    """
    register()
    try:
        if load_format == "dummy":
            model = _dummy_model(loaded.config, device, dtype)
        else:
            model = _read_weights(loaded.config, model_dir, device, dtype)
    except torch.OutOfMemoryError as error:
        raise ModelLoadError(
            f"The weights in {model_dir} do not fit into the memory of {device}; use a smaller "
            "model, a smaller dtype or another device."
        ) from error
    except SafetensorError as error:
        raise ModelLoadError(
            f"A *.safetensors file in {model_dir} is damaged or incomplete "
            f"({first_line(error)}): fetch it again."
        ) from error
    except ModelError:
        raise
    except Exception as error:  # of a configuration and weights that anybody may have written
        raise ModelLoadError(
            f"The model in {model_dir} cannot be loaded: {_reason(error)}"
        ) from error
    model.set_attn_implementation(ATTENTION_NAME)
    model.eval()
    model.requires_grad_(False)
    return model  # type: ignore[no-any-return]


def _dummy_model(
    config: PreTrainedConfig, device: torch.device, dtype: DTypeName
) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(_DUMMY_SEED)
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))


def _read_weights(
    config: PreTrainedConfig, model_dir: Path, device: torch.device, dtype: DTypeName
) -> PreTrainedModel:
    for file in weight_files(model_dir):
        read_header(file)  # says better than what follows which file is missing or damaged
    placement = {"device_map": {"": device}} if device.type == "cuda" else {}
    model, info = AutoModelForCausalLM.from_pretrained(
        model_dir,
        config=config,
        dtype=getattr(torch, dtype),
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
        **placement,
    )
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelLoadError(
            f"{model_dir} lacks {len(missing)} weights of the model, the first one is "
            f"{missing[0]}; the checkpoint is incomplete or of another architecture."
        )
    return model
