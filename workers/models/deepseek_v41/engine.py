"""Makes a DeepSeek-V4.1 engine: reads the configuration, loads the weights, plans the memory."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from workers.cache_layout import weights_identity
from workers.device import default_dtype, open_device
from workers.engine import EngineError, EngineInfo, ModelLoadError
from workers.host_memory import available_host_memory
from workers.memory_plan import PoolPlan, host_pool_bytes, pages_for, plan_pool
from workers.models.deepseek_v41.cache_layout import build_cache_layout
from workers.models.deepseek_v41.checkpoint import open_checkpoint
from workers.models.deepseek_v41.config_file import read_config
from workers.models.deepseek_v41.dummy_weights import DummyWeights
from workers.models.deepseek_v41.engram_hash import EngramHash
from workers.models.deepseek_v41.engram_lookup import EngramLookup
from workers.models.deepseek_v41.engram_table import (
    DummyEngramTable,
    EngramTable,
    open_engram_table,
    stored_tensors,
)
from workers.models.deepseek_v41.engram_token_map import dummy_token_map, load_token_map
from workers.models.deepseek_v41.engram_warmup import EngramWarmup
from workers.models.deepseek_v41.loading import load_model
from workers.models.deepseek_v41.serving_caches import ServingCaches
from workers.models.deepseek_v41.serving_engine import DeepseekV41Engine
from workers.models.deepseek_v41.serving_layout import (
    KVFormat,
    ServingLayout,
    build_serving_layout,
)
from workers.trial_steps import heaviest_steps

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from workers.device import DTypeName
    from workers.engine_settings import EngineSettings
    from workers.models.deepseek_v41.checkpoint import WeightSource
    from workers.models.deepseek_v41.config import ModelConfig
    from workers.models.deepseek_v41.model import DeepseekV41
    from workers.models.deepseek_v41.safetensors_header import StoredTensor

_log = logging.getLogger(__name__)


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
            hicache_copy=self.settings.hicache_copy,
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
        max_model_len=_context_length(settings, config),
        vocab_size=config.vocab_size,
        eos_token_ids=tuple(t for t in config.eos_token_ids if t < config.vocab_size),
        # Engram rows of a decode are looked up on the host, from the token sampled before.
        pipeline_depth=0 if device.type == "cpu" or config.engram_layer_ids else 1,
        device=str(device) if device.type == "cpu" else torch.cuda.get_device_name(device),
    )
    settings.report("planning memory")
    plan = _plan_memory(parts, info)
    info = replace(info, num_pages=plan.num_pages, max_model_len=plan.max_model_len)
    settings.report(
        f"KV cache of {plan.num_pages} pages, {plan.num_pages * info.layout.page_tokens} tokens"
    )
    return _with_pools(parts, info)


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


def _context_length(settings: EngineSettings, config: ModelConfig) -> int:
    limit = config.max_position_embeddings
    if settings.max_model_len is None:
        return limit
    if settings.max_model_len > limit:
        _log.warning(
            "The context length of %d tokens exceeds the %d of the model's configuration; "
            "output may degrade beyond that.",
            settings.max_model_len,
            limit,
        )
    return settings.max_model_len


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


def _plan_memory(parts: _Parts, info: EngineInfo) -> PoolPlan:
    settings, layout, device = parts.settings, info.layout, parts.device
    states = info.max_num_seqs * layout.state_bytes
    if settings.kv_cache_gb is not None:
        budget = int(settings.kv_cache_gb * 1e9)
    elif device.type == "cpu":
        pages = info.max_num_seqs * pages_for(info.max_model_len, layout.page_tokens)
        budget = host_pool_bytes(available_host_memory() - states, pages * layout.page_bytes)
    else:
        peak = _measure_peak(parts, info)
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        budget = int(free * settings.gpu_memory_utilization) - peak - states
    return plan_pool(
        max(0, budget),
        layout.page_bytes,
        layout.page_tokens,
        info.max_model_len,
        info.max_num_seqs,
    )


def _measure_peak(parts: _Parts, info: EngineInfo) -> int:
    """Bytes that the largest steps take beside weights and pools; runs them against one page."""
    engine = _with_pools(parts, replace(info, num_pages=1))
    before = torch.cuda.memory_allocated(parts.device)
    torch.cuda.reset_peak_memory_stats(parts.device)
    limit = parts.settings.max_batched_tokens
    try:
        for plan in heaviest_steps(info, limit):
            engine.launch(plan)
            engine.collect()
    except EngineError as error:
        raise ModelLoadError(
            f"A trial step of {limit} tokens failed; lower the number of batched tokens or the "
            f"context length ({error})."
        ) from error
    peak = torch.cuda.max_memory_allocated(parts.device) - before
    _log.info("The largest step takes %.2f GiB beside weights and KV cache.", peak / 2**30)
    return peak


def _with_pools(parts: _Parts, info: EngineInfo) -> DeepseekV41Engine:
    try:
        with torch.inference_mode():
            return parts.engine(info)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        pages = info.num_pages * info.layout.page_bytes
        states = info.max_num_seqs * info.layout.state_bytes
        raise ModelLoadError(
            f"The KV cache of {pages / 2**30:.1f} GiB and the states of {info.max_num_seqs} sequences, "
            f"{states / 2**30:.1f} GiB, do not fit into the memory of {info.device}; lower their "
            "size or the memory utilisation."
        ) from error
