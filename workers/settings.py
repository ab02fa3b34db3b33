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


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    kind: EngineKind = "auto"
    fake_step_seconds: float = 0.0
    """Fake engine only: how long a step takes."""
    fake_checking: bool = False
    """Fake engine only: as in `FakeEngineSettings`."""
    model_dir: str
    accelerator: Accelerator
    device_index: int = 0
    num_threads: int
    """Number of compute threads on a CPU."""
    dtype: DType
    load_format: LoadFormat
    hf_overrides: dict[str, object]
    """Entries of the model's `config.json` to replace; nested objects are merged."""
    max_model_len: int | None
    """None: the model's configuration decides."""
    max_num_seqs: int
    max_batched_tokens: int
    """Prompt tokens per prompt step."""
    kv_cache_gb: float | None
    """Size of the device page pool in 10^9 bytes; None: planned from the free memory."""
    gpu_memory_utilization: float
    """Share of the GPU memory left after loading that the engine may use."""
    kv_dtype: KVDType
    keep_tokens: int
    """Bounded replay: last prompt tokens that the decoder layers run on; 0: all of them. Models without such
    layers ignore it."""
    deterministic: bool
    """Results are batch-invariant: the bits of a sequence do not depend on what else runs."""
    stores_prefixes: bool
    """A host prefix cache stores pages and states of this engine."""


class WorkerSettings(msgspec.Struct, frozen=True):
    process: ProcessSettings
    rank: DpRank
    engine: EngineSettings
    prefill_any_interval: int
    """Decode steps between two prompt steps while something decodes."""
    hicache_fd: int | None
    """Segment of this rank's prefix cache, inherited from the daemon; None: no prefix cache."""
    hicache_bytes: int
    hicache_states: int
    hicache_copy: CopyChoice
    """How pages travel between a GPU and the prefix cache."""
