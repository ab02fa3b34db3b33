"""What an engine with a model needs to know to load it; made from the worker's settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hicache.layout import CacheLayout
    from workers.settings import Accelerator, KVDType, LoadFormat


@dataclass(frozen=True)
class EngineSettings:
    """What to load, where, and how much memory to use."""

    model_dir: str
    accelerator: Accelerator
    device_index: int
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    load_format: LoadFormat
    max_model_len: int | None
    """None: what the model's configuration says."""
    max_num_seqs: int
    kv_cache_gb: float | None
    """Size of the page pool in 10^9 bytes; None: planned from the free memory."""
    gpu_memory_utilization: float
    """Share of the GPU memory left after loading that the engine may use."""
    max_batched_tokens: int
    """Largest number of tokens in a prompt step."""
    num_threads: int
    report: Callable[[str], None]
    """Called with one line of text at each stage of loading."""
    kv_dtype: KVDType = "auto"
    keep_tokens: int = 0
    """Bounded replay: last prompt tokens that the decoder layers run on; 0: all of them. Models
    without such layers ignore it."""
    deterministic: bool = False
    """Results of a sequence are bit-equal whatever else is in its batches."""
    hf_overrides: Mapping[str, object] = field(default_factory=dict)
    """Entries of `config.json` to replace; nested objects are merged."""
    stores_prefixes: bool = False
    """A host prefix cache stores pages and states of this engine."""
    check_layout: Callable[[CacheLayout], object] = lambda _layout: None
    """Called by an engine that knows its cache layout before it loads the weights, to have what cannot be
    served refused by then (`ModelLoadError`). The fingerprint is not final yet."""
