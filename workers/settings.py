"""Settings of an engine worker, resolved by the daemon."""

from __future__ import annotations

from typing import Literal

import msgspec

from hicache.copies.copy_choice import CopyChoice
from transport.child import ProcessSettings
from transport.ids import DpRank

Accelerator = Literal["cpu", "nvidia"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
KVDType = Literal["auto", "float32", "bf16", "compact"]
LoadFormat = Literal["auto", "dummy"]
EngineKind = Literal["auto", "fake"]


class WorkerSettings(msgspec.Struct, frozen=True):
    """Everything that one worker is told."""

    process: ProcessSettings
    rank: DpRank
    engine: EngineKind
    model_dir: str
    accelerator: Accelerator
    device_index: int
    dtype: DType
    load_format: LoadFormat
    max_model_len: int | None
    max_num_seqs: int
    kv_cache_gb: float | None
    """Size of the device page pool; None: planned from the free memory."""
    gpu_memory_utilization: float
    max_batched_tokens: int
    """Prompt tokens per prompt step."""
    prefill_any_interval: int
    """Decode steps between two prompt steps while something decodes."""
    num_threads: int
    kv_dtype: KVDType
    keep_tokens: int
    """Bounded replay: last prompt tokens that a decoder half runs on; 0: all of them."""
    deterministic: bool
    hf_overrides: dict[str, object]
    """Entries of the model's `config.json` to replace."""
    hicache_fd: int | None
    """Segment of this rank's prefix cache, inherited from the daemon; None: no prefix cache."""
    hicache_bytes: int
    hicache_states: int
    hicache_copy: CopyChoice
    """How pages travel between a GPU and the prefix cache."""
    fake_step_seconds: float = 0.0
    """Fake engine only: how long a step takes."""
