"""Engines over small models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from workers.attention.batch import BatchTensors, IntArray, Segment
from workers.engine.create import create_engine
from workers.engine.engine import ModelEngine
from workers.models.served_model import LoadObserver
from workers.settings import EngineSettings

QUIET = LoadObserver()


def engine_settings(model_dir: Path | str = "", **changes: object) -> EngineSettings:
    """For a CPU, with `changes`."""
    values: dict[str, object] = dict(
        model_dir=str(model_dir), accelerator="cpu", num_threads=1, dtype="float32",
        load_format="auto", hf_overrides={}, max_model_len=None, max_num_seqs=4,
        max_batched_tokens=512, kv_cache_gb=None, gpu_memory_utilization=0.9, kv_dtype="auto",
        keep_tokens=0, deterministic=False, stores_prefixes=False,
    )  # fmt: skip
    return EngineSettings(**{**values, **changes})  # type: ignore[arg-type]


def open_engine(model_dir: Path, observer: LoadObserver = QUIET, **changes: object) -> ModelEngine:
    return create_engine(engine_settings(model_dir, **changes), observer)


def save_random_llama(folder: Path, vocab_size: int) -> Path:
    """Two layers with grouped heads and the same weights each time, float32."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=96, num_attention_heads=4,
        num_key_value_heads=2, num_hidden_layers=2, max_position_embeddings=1024,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


class DirectUpload:
    """`StepUpload` on a CPU, without buffers."""

    def put(self, array: IntArray) -> Tensor:
        return torch.from_numpy(array.copy())


def batch_tensors(
    segments: Sequence[Segment], token_ids: Tensor, block_table: Tensor
) -> BatchTensors:
    """For rows whose logits are chosen otherwise."""
    slots = torch.tensor([segment.slot for segment in segments])
    return BatchTensors(
        token_ids=token_ids,
        positions=torch.cat([torch.arange(s.start, s.end) for s in segments]),
        row_slots=slots.repeat_interleave(torch.tensor([s.rows for s in segments])),
        slots=slots,
        logit_rows=torch.empty(0, dtype=torch.int64),
        block_table=block_table,
    )
