"""Makes a DeepSeek-V4.1 engine: reads the configuration, loads the weights, plans the memory."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from workers.contract import EngineInfo, ModelLoadError
from workers.engine.device import default_dtype, open_device
from workers.engine.pool_sizing import allocating_pools, choose_context_length, size_pools
from workers.models.cache_layout import weights_identity
from workers.models.deepseek_v41.cache.cache_layout import build_cache_layout
from workers.models.deepseek_v41.cache.pools import ServingCaches
from workers.models.deepseek_v41.cache.row_layout import (
    KVFormat,
    ServingLayout,
    build_serving_layout,
)
from workers.models.deepseek_v41.config.config_file import read_config
from workers.models.deepseek_v41.engram.hashing import EngramHash
from workers.models.deepseek_v41.engram.lookup import EngramLookup
from workers.models.deepseek_v41.engram.table import (
    DummyEngramTable,
    EngramTable,
    open_engram_table,
    stored_tensors,
)
from workers.models.deepseek_v41.engram.token_map import dummy_token_map, load_token_map
from workers.models.deepseek_v41.engram.warmup import EngramWarmup
from workers.models.deepseek_v41.model.serving_engine import DeepseekV41Engine
from workers.models.deepseek_v41.weights.checkpoint import open_checkpoint
from workers.models.deepseek_v41.weights.dummy import DummyWeights
from workers.models.deepseek_v41.weights.loading import load_model

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from workers.engine.device import DTypeName
    from workers.engine.settings import EngineSettings
    from workers.models.deepseek_v41.config.model_config import ModelConfig
    from workers.models.deepseek_v41.model.model import DeepseekV41
    from workers.models.deepseek_v41.weights.checkpoint import WeightSource
    from workers.models.safetensors_header import StoredTensor


@dataclass(frozen=True)
class _Parts:
    """What an engine is made of, but for the pools."""

    settings: EngineSettings
    model: DeepseekV41
    layout: ServingLayout
    hashing: EngramHash | None
    tables: Mapping[int, EngramTable]
    warmup: EngramWarmup | None
    dtype: torch.dtype
    device: torch.device

    def engine(self, info: EngineInfo) -> DeepseekV41Engine:
        """An engine with pools of the sizes that `info` names."""
        config = self.model.config
        caches = ServingCaches(
            config, self.layout, info.num_pages, info.max_num_seqs, self.device, self.dtype
        )
        engram = None
        if self.hashing is not None:
            engram = EngramLookup(
                self.hashing,
                self.tables,
                info.max_num_seqs,
                self.dtype,
                self.device,
                self.warmup,
            )
        return DeepseekV41Engine(
            self.model,
            caches,
            engram,
            info,
            self.device,
            exact=self.settings.deterministic,
        )


def create_deepseek_v41_engine(settings: EngineSettings) -> DeepseekV41Engine:
    """Load a model and plan its memory.

    Raises:
        ModelLoadError: the model cannot be loaded or served here; one sentence says why.
    """
    model_dir = Path(settings.model_dir)
    device = open_device(settings.accelerator, settings.device_index, settings.num_threads)
    config = read_config(model_dir, settings.hf_overrides)
    if settings.keep_tokens:
        config.check_keep_tokens(settings.keep_tokens)
    name = _dtype_name(settings, config, device)
    kv_format = _kv_format(settings, config, name)
    layout = build_serving_layout(
        config, kv_format, settings.keep_tokens, store_anchors=settings.stores_prefixes
    )
    settings.check_layout(
        build_cache_layout(config, layout, settings.keep_tokens, name, identity="")
    )
    settings.report(f"loading deepseek_v41 weights as {name} to {device}, KV cache {kv_format}")
    with torch.inference_mode():
        parts, identity = _load(settings, config, layout, getattr(torch, name), device)
    info = EngineInfo(
        layout=build_cache_layout(config, layout, settings.keep_tokens, name, identity),
        num_pages=0,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=choose_context_length(settings.max_model_len, config.max_position_embeddings),
        vocab_size=config.vocab_size,
        eos_token_ids=tuple(t for t in config.eos_token_ids if t < config.vocab_size),
        # Engram rows of a decode are looked up on the host, from the token sampled before.
        pipeline_depth=0 if device.type == "cpu" or config.engram_layer_ids else 1,
        device=str(device) if device.type == "cpu" else torch.cuda.get_device_name(device),
    )
    info = size_pools(settings, info, device, parts.engine)
    with allocating_pools(info, device):
        return parts.engine(info)


def _dtype_name(settings: EngineSettings, config: ModelConfig, device: torch.device) -> DTypeName:
    if settings.dtype != "auto":
        return settings.dtype
    return default_dtype(device, getattr(torch, config.dtype))


def _kv_format(settings: EngineSettings, config: ModelConfig, dtype: DTypeName) -> KVFormat:
    match settings.kv_dtype:
        case "auto":
            return "compact" if config.quantization else dtype
        case "bf16":
            return "bfloat16"
        case _:
            return settings.kv_dtype


def _load(
    settings: EngineSettings,
    config: ModelConfig,
    layout: ServingLayout,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[_Parts, str]:
    """The parts, and a digest of weights and token map."""
    model_dir = Path(settings.model_dir)
    token_map: Tensor | None = None
    source: WeightSource
    tables: dict[int, EngramTable]
    table_tensors: list[StoredTensor] = []
    if settings.load_format == "dummy":
        token_map = dummy_token_map(config) if config.engram_layer_ids else None
        source = DummyWeights(config, device)
        tables = {layer: DummyEngramTable(config, layer) for layer in config.engram_layer_ids}
        identity = "dummy"
    else:
        whole = read_config(model_dir).num_hidden_layers
        if config.num_hidden_layers != whole:
            raise ModelLoadError(
                f"--hf-overrides gives the model {config.num_hidden_layers} layers, but the weights in "
                f"{model_dir} are of {whole}: other shapes need random weights (--load-format dummy)."
            )
        token_map = load_token_map(model_dir, config) if config.engram_layer_ids else None
        checkpoint = open_checkpoint(model_dir, config)
        source = checkpoint
        tables = {layer: open_engram_table(checkpoint, layer) for layer in config.engram_layer_ids}
        table_tensors = stored_tensors(checkpoint, config.engram_layer_ids)
        identity = weights_identity(model_dir)
    model = load_model(settings, config, source, dtype, device)
    parts = _Parts(
        settings=settings,
        model=model,
        layout=layout,
        hashing=None if token_map is None else EngramHash(config, token_map),
        tables=tables,
        # After the weights: both come from the same disk.
        warmup=EngramWarmup(table_tensors) if table_tensors else None,
        dtype=dtype,
        device=device,
    )
    return parts, identity + _digest(token_map)


def _digest(token_map: Tensor | None) -> str:
    if token_map is None:
        return ""
    return ":" + hashlib.blake2b(token_map.numpy().tobytes(), digest_size=16).hexdigest()
