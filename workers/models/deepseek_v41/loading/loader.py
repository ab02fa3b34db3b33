"""Loads DeepSeek-V4.1: configuration, weights, Engram tables."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from workers.contract import ModelLoadError
from workers.hardware.device import default_dtype
from workers.models.deepseek_v41.cache.pools import Caches
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
from workers.models.deepseek_v41.layout.cache_layout import build_cache_layout
from workers.models.deepseek_v41.layout.row_layout import (
    KVFormat,
    build_row_layout,
)
from workers.models.deepseek_v41.loading.network import load_network
from workers.models.deepseek_v41.model.served import ServedDeepseekV41
from workers.models.deepseek_v41.weights.checkpoint import open_checkpoint
from workers.models.deepseek_v41.weights.dummy import DummyWeights
from workers.models.served_model import LoadedModel, LoadObserver, choose_context_length
from workers.models.weights_identity import weights_identity

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from workers.hardware.device import DTypeName
    from workers.models.deepseek_v41.config.model_config import ModelConfig
    from workers.models.deepseek_v41.model.model import DeepseekV41
    from workers.models.deepseek_v41.weights.checkpoint import WeightSource
    from workers.models.safetensors_header import StoredTensor
    from workers.settings import EngineSettings


def load(settings: EngineSettings, device: torch.device, observer: LoadObserver) -> LoadedModel:
    model_dir = Path(settings.model_dir)
    config = read_config(model_dir, settings.hf_overrides)
    if settings.keep_tokens:
        config.check_keep_tokens(settings.keep_tokens)
    name = _dtype_name(settings, config, device)
    kv_format = _kv_format(settings, config, name)
    layout = build_row_layout(
        config, kv_format, settings.keep_tokens, store_anchors=settings.stores_prefixes
    )
    observer.check_layout(
        build_cache_layout(config, layout, settings.keep_tokens, name, identity="")
    )
    observer.report(f"loading deepseek_v41 weights as {name} to {device}, KV cache {kv_format}")
    dtype: torch.dtype = getattr(torch, name)
    with torch.inference_mode():
        parts = _load_parts(settings, config, dtype, device, observer)

    def serve(num_pages: int, num_slots: int) -> ServedDeepseekV41:
        engram = None
        if parts.hashing is not None:
            engram = EngramLookup(
                parts.hashing, parts.tables, num_slots, dtype, device, parts.warmup
            )
        return ServedDeepseekV41(
            parts.network,
            Caches(config, layout, num_pages, num_slots, device, dtype),
            engram,
            batch_invariant=settings.deterministic,
        )

    return LoadedModel(
        layout=build_cache_layout(config, layout, settings.keep_tokens, name, parts.identity),
        vocab_size=config.vocab_size,
        eos_token_ids=tuple(t for t in config.eos_token_ids if t < config.vocab_size),
        max_model_len=choose_context_length(settings.max_model_len, config.max_position_embeddings),
        needs_tokens_on_host=bool(config.engram_layer_ids),
        serve=serve,
        close=parts.close,
    )


@dataclass(frozen=True)
class _Parts:
    network: DeepseekV41
    hashing: EngramHash | None
    tables: Mapping[int, EngramTable]
    warmup: EngramWarmup | None
    """Reads the tables in the meantime; None: nobody does."""
    identity: str
    """Digest of weights and token map."""

    def close(self) -> None:
        if self.warmup is not None:
            self.warmup.close()
        for table in self.tables.values():
            table.close()


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


def _load_parts(
    settings: EngineSettings,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    observer: LoadObserver,
) -> _Parts:
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
    network = load_network(settings, config, source, dtype, device, observer.report)
    return _Parts(
        network=network,
        hashing=None if token_map is None else EngramHash(config, token_map),
        tables=tables,
        # After the weights: both come from the same disk.
        warmup=EngramWarmup(table_tensors) if table_tensors else None,
        identity=identity + _digest(token_map),
    )


def _digest(token_map: Tensor | None) -> str:
    if token_map is None:
        return ""
    return ":" + hashlib.blake2b(token_map.numpy().tobytes(), digest_size=16).hexdigest()
