"""The engine for Hugging Face models: `Engine` over PyTorch, on a CPU or one CUDA GPU.

On a GPU `launch` only enqueues work: inputs travel in one pinned copy, tokens stay in per-slot
tables, and `collect` waits for one event a step. On a CPU `launch` computes and `collect` hands out
the result.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import nn

from hicache.copy_choice import CopyChoice
from hicache.cuda_pools import PinnedPool, open_cuda_row_copier
from hicache.errors import HostPoolError
from hicache.host_pool import HostPool
from hicache.row_copy import CpuRowCopier, PendingCopy, RowCopier
from hicache.runs import IndexArray
from workers.cache_layout import build_cache_layout, layer_shapes, weights_identity
from workers.device import (
    DTypeName,
    default_dtype,
    offline_environment,
    open_device,
)
from workers.engine import (
    CacheCopies,
    EngineError,
    EngineInfo,
    ModelLoadError,
    StepPlan,
    StepResult,
)
from workers.engine_settings import EngineSettings
from workers.exact_step import ExactStep, TiledLayers
from workers.host_memory import available_host_memory
from workers.memory_plan import PoolPlan, host_pool_bytes, pages_for, plan_pool
from workers.model_loader import LoadedConfig, load_config, load_model
from workers.model_probe import model_logits, pin_rope, probe_model
from workers.paged_attention import PagePool, SegmentedStep
from workers.sampler import SampledTokens, Sampler
from workers.step_inputs import SlotTables
from workers.trial_steps import heaviest_steps

_log = logging.getLogger(__name__)

_DEFAULT_CONTEXT: Final = 4096
"""Context length of a model whose configuration names none."""


@dataclass(frozen=True)
class _Running:
    """A launched step: its tokens on their way to the host."""

    step: int
    sampled: SampledTokens
    done: torch.cuda.Event | None


class TorchEngine:
    """See `workers.engine.Engine`. Made by `create_torch_engine`."""

    def __init__(
        self,
        model: nn.Module,
        pool: PagePool,
        info: EngineInfo,
        device: torch.device,
        exact: TiledLayers | None = None,
        hicache_copy: CopyChoice = "auto",
    ) -> None:
        """Args:
        model: what computes.
        pool: its pages.
        info: what this engine offers.
        device: of both.
        exact: the model's linear layers, for results that do not depend on the batch.
        hicache_copy: how pages travel between a GPU and the host pool.
        """
        self._info = info
        self._exact = exact
        self._device = device
        self._model: nn.Module | None = model
        self._tables: SlotTables | None = SlotTables(
            info.max_num_seqs, pages_for(info.max_model_len, info.layout.page_tokens), pool
        )
        self._sampler: Sampler | None = Sampler(
            info.max_num_seqs, info.vocab_size, info.eos_token_ids, device
        )
        self._running: deque[_Running] = deque()
        self._hicache_copy: CopyChoice = hicache_copy
        self._pinned: PinnedPool | None = None
        self._copies: PageCopies | None = None

    @property
    def info(self) -> EngineInfo:
        """See `Engine.info`."""
        return self._info

    @property
    def page_pool(self) -> PagePool:
        """The pool, for those who copy pages in and out of it.

        Raises:
            EngineError: the engine is closed.
        """
        return self._open()[1].pool

    def launch(self, plan: StepPlan) -> None:
        """See `Engine.launch`.

        Raises:
            EngineError: the engine is closed, has too many steps running, or the device failed.
        """
        if len(self._running) > self._info.pipeline_depth:
            raise EngineError(
                f"{len(self._running)} steps are running; collect one before the next launch."
            )
        try:
            if self._copies is not None:
                self._copies.before_step(plan)
            with torch.inference_mode():
                sampled = self._compute(plan)
                done = None
                if self._device.type == "cuda":
                    sampled = sampled.to_host()
                    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    done.record()
        except torch.OutOfMemoryError as error:
            raise EngineError(
                "The device ran out of memory during a step; lower the memory utilisation or the "
                f"number of batched tokens ({error})."
            ) from error
        except RuntimeError as error:
            if isinstance(error, EngineError):
                raise
            raise EngineError(f"The device failed during step {plan.step}: {error}") from error
        self._running.append(_Running(plan.step, sampled, done))

    def _compute(self, plan: StepPlan) -> SampledTokens:
        model, tables, sampler = self._open()
        sampler.observe(plan.prompts)
        inputs = tables.prepare(plan)
        attention = inputs.attention
        if self._exact is not None and isinstance(attention, SegmentedStep):
            runs = [(segment.start, segment.tokens) for segment in attention.segments]
            self._exact.begin(runs, [position - 1 for position in inputs.positions])
            attention = ExactStep(attention)
        logits = model_logits(
            model, inputs.input_ids, inputs.position_ids, attention, inputs.sample_rows
        )
        if not inputs.slots:
            return SampledTokens(inputs.slot_index, [], [])
        sampled = sampler.sample(logits, inputs.slots, inputs.slot_index, inputs.positions)
        tables.last_token[inputs.slot_index] = sampled.tokens
        return sampled

    def collect(self) -> StepResult:
        """See `Engine.collect`."""
        if not self._running:
            raise EngineError("No step is running.")
        running = self._running.popleft()
        if running.done is not None:
            try:
                running.done.synchronize()
            except RuntimeError as error:
                raise EngineError(
                    f"The device failed during step {running.step}: {error}"
                ) from error
        return StepResult(
            step=running.step,
            tokens=running.sampled.tokens.numpy().astype(np.int32),
            logprobs=running.sampled.host_logprobs(),
        )

    def cache_copies(self, pool: HostPool) -> CacheCopies:
        """See `Engine.cache_copies`."""
        rows = self.page_pool.rows
        if rows.device.type == "cpu":
            return PageCopies(CpuRowCopier(rows.numpy(), pool.page_rows))
        try:
            self._pinned = PinnedPool(pool)
            copier = open_cuda_row_copier(rows, pool.page_rows, self._hicache_copy)
        except HostPoolError as error:
            raise EngineError(str(error)) from error
        self._copies = PageCopies(copier)
        return self._copies

    def close(self) -> None:
        """See `Engine.close`."""
        if self._pinned is not None:
            torch.cuda.synchronize(self._device)
            self._pinned.close()
            self._pinned = self._copies = None
        self._running.clear()
        self._model = self._tables = self._sampler = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _open(self) -> tuple[nn.Module, SlotTables, Sampler]:
        if self._model is None or self._tables is None or self._sampler is None:
            raise EngineError("The engine is closed.")
        return self._model, self._tables, self._sampler


class PageCopies:
    """`workers.engine.CacheCopies` of a model that keeps no state beside its pages."""

    def __init__(self, copier: RowCopier) -> None:
        self._copier = copier

    def before_step(self, plan: StepPlan) -> None:
        """Keep the pages that `plan` writes to apart from stores that are under way."""
        self._copier.before_overwrite(plan.written_pages())

    def load_pages(self, pages: IndexArray, host_slots: IndexArray) -> PendingCopy:
        """See `CacheCopies`."""
        return self._copier.upload(pages, host_slots)

    def store_pages(self, pages: IndexArray, host_slots: IndexArray) -> PendingCopy:
        """See `CacheCopies`."""
        return self._copier.download(pages, host_slots)

    def load_state(self, slot: int, position: int, host_slot: int) -> PendingCopy:
        """Never asked for."""
        raise EngineError("This model keeps no states.")

    def store_state(self, slot: int, position: int, host_slot: int) -> PendingCopy:
        """Never asked for."""
        raise EngineError("This model keeps no states.")


def create_torch_engine(settings: EngineSettings) -> TorchEngine:
    """Load a model and plan its memory.

    Raises:
        ModelLoadError: the model cannot be loaded or served here; one sentence says why.
    """
    offline_environment()
    model_dir = Path(settings.model_dir)
    device = open_device(settings.accelerator, settings.device_index, settings.num_threads)
    leave_out_cudnn_attention()
    loaded = load_config(model_dir, settings.hf_overrides)
    dtype = settings.dtype
    if dtype == "auto":
        dtype = default_dtype(device, loaded.checkpoint_dtype)
    shapes = layer_shapes(loaded.config)
    settings.report(f"loading {loaded.config.model_type} weights as {dtype} to {device}")
    with torch.inference_mode():
        model = load_model(loaded, model_dir, device, dtype, settings.load_format)
        vocab_size = probe_model(model, loaded, shapes, device)
        max_model_len = _context_length(settings, loaded)
        rope = f":{max_model_len}" if pin_rope(model, max_model_len, device) else ""
        exact = _make_exact(model, device) if settings.deterministic else None
    identity = "dummy" if settings.load_format == "dummy" else weights_identity(model_dir)
    info = EngineInfo(
        layout=build_cache_layout(
            shapes, _kv_dtype(settings, dtype), loaded.config, identity + rope
        ),
        num_pages=0,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=tuple(t for t in loaded.eos_token_ids if t < vocab_size),
        pipeline_depth=0 if device.type == "cpu" else 1,
        device=str(device) if device.type == "cpu" else torch.cuda.get_device_name(device),
    )
    settings.report("planning memory")
    plan = _plan_memory(settings, model, info, device)
    info = replace(info, num_pages=plan.num_pages, max_model_len=plan.max_model_len)
    settings.report(
        f"KV cache of {plan.num_pages} pages, {plan.num_pages * info.layout.page_tokens} tokens"
    )
    return TorchEngine(
        model, _allocate_pool(info, device), info, device, exact, settings.hicache_copy
    )


def leave_out_cudnn_attention() -> None:
    """Take cuDNN out of PyTorch's choice of attention kernels, for the whole process.

    On a Hopper GPU it comes first there, and it builds a plan for every shape of queries and keys that it
    has not seen before: here that is nearly every step. The others take any shape as it is.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def _make_exact(model: nn.Module, device: torch.device) -> TiledLayers:
    if device.type != "cpu":
        raise ModelLoadError(
            "--deterministic covers models other than DeepSeek-V4.1 on a CPU only: run it without, "
            "or with DEEPINFER_ACCELERATOR=cpu."
        )
    torch.set_num_threads(1)  # with more, the last bits depend on how a tensor is divided
    head = model.get_output_embeddings()  # type: ignore[operator]
    return TiledLayers(model, head)


def _kv_dtype(settings: EngineSettings, dtype: DTypeName) -> DTypeName:
    match settings.kv_dtype:
        case "compact":
            raise ModelLoadError(
                "--kv-dtype compact exists for DeepSeek-V4.1 only; use auto, float32 or bf16."
            )
        case "bf16":
            return "bfloat16"
        case "float32":
            return "float32"
        case "auto":
            return dtype


def _context_length(settings: EngineSettings, loaded: LoadedConfig) -> int:
    limit = loaded.max_position
    if settings.max_model_len is None:
        return limit or _DEFAULT_CONTEXT
    if limit is not None and settings.max_model_len > limit:
        _log.warning(
            "The context length of %d tokens exceeds the %d of the model's configuration; "
            "output may degrade beyond that.",
            settings.max_model_len,
            limit,
        )
    return settings.max_model_len


def _allocate_pool(info: EngineInfo, device: torch.device) -> PagePool:
    try:
        with torch.inference_mode():
            return PagePool(info.layout, info.num_pages, device)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        size = info.num_pages * info.layout.page_bytes / 2**30
        raise ModelLoadError(
            f"The KV cache of {size:.1f} GiB does not fit into the memory of {info.device}; lower "
            "its size or the memory utilisation."
        ) from error


def _plan_memory(
    settings: EngineSettings, model: nn.Module, info: EngineInfo, device: torch.device
) -> PoolPlan:
    layout = info.layout
    if settings.kv_cache_gb is not None:
        budget = int(settings.kv_cache_gb * 1e9)
    elif device.type == "cpu":
        pages = info.max_num_seqs * pages_for(info.max_model_len, layout.page_tokens)
        budget = host_pool_bytes(available_host_memory(), pages * layout.page_bytes)
    else:
        peak = _measure_peak(settings, model, info, device)
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        budget = int(free * settings.gpu_memory_utilization) - peak
    return plan_pool(
        max(0, budget),
        layout.page_bytes,
        layout.page_tokens,
        info.max_model_len,
        info.max_num_seqs,
    )


def _measure_peak(
    settings: EngineSettings, model: nn.Module, info: EngineInfo, device: torch.device
) -> int:
    """Bytes that the largest prompt step and the largest decode step take beside weights and pool.

    Both run against one single page that stands for every page of long sequences.
    """
    pool = PagePool(info.layout, 1, device)
    engine = TorchEngine(model, pool, info, device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        for plan in heaviest_steps(info, settings.max_batched_tokens):
            engine.launch(plan)
            engine.collect()
    except EngineError as error:
        raise ModelLoadError(
            f"A trial step of {settings.max_batched_tokens} tokens failed; lower the number of "
            f"batched tokens or the context length ({error})."
        ) from error
    peak = torch.cuda.max_memory_allocated(device) - before
    _log.info("The largest step takes %.2f GiB beside weights and KV cache.", peak / 2**30)
    return peak
