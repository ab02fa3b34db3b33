"""The engine for Hugging Face models: `Engine` over PyTorch, on a CPU or one CUDA GPU.

On a GPU `launch` only enqueues work: inputs travel in one pinned copy, tokens stay in per-slot
tables, and `collect` waits for one event a step. On a CPU `launch` computes and `collect` hands out
the result.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from hicache.copies.cache_copies import DeviceCache
from hicache.copies.cuda.rows import tensor_rows
from workers.attention.paged import PagePool, SegmentedStep
from workers.contract import (
    EngineError,
    EngineInfo,
    ModelLoadError,
    StepPlan,
)
from workers.engine.device import (
    DTypeName,
    default_dtype,
    offline_environment,
    open_device,
)
from workers.engine.memory_plan import pages_for
from workers.engine.pool_sizing import allocating_pools, choose_context_length, size_pools
from workers.engine.running_step import RunningStep, StepRunner
from workers.engine.settings import EngineSettings
from workers.engine.step_inputs import SlotTables
from workers.models.cache_layout import build_cache_layout, layer_shapes, weights_identity
from workers.models.hf.exact_step import ExactStep, TiledLayers
from workers.models.hf.loader import load_config, load_model
from workers.models.hf.probe import model_logits, pin_rope, probe_model
from workers.sampling.sampler import SampledTokens, Sampler


class TorchEngine:
    """See `workers.contract.Engine`. Made by `create_torch_engine`."""

    def __init__(
        self,
        model: nn.Module,
        pool: PagePool,
        info: EngineInfo,
        device: torch.device,
        exact: TiledLayers | None = None,
    ) -> None:
        """Args:
        model: what computes.
        pool: its pages.
        info: what this engine offers.
        device: of both.
        exact: the model's linear layers, for results that do not depend on the batch.
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
        self._runner = StepRunner(device, info.pipeline_depth)

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def page_pool(self) -> PagePool:
        """The pool, for those who copy pages in and out of it.

        Raises:
            EngineError: the engine is closed.
        """
        return self._open()[1].pool

    def launch(self, plan: StepPlan) -> RunningStep:
        """See `Engine.launch`.

        Raises:
            EngineError: the engine is closed, has too many steps running, or the device failed.
        """
        return self._runner.launch(plan.step, lambda: self._compute(plan))

    def _compute(self, plan: StepPlan) -> tuple[list[int], SampledTokens]:
        model, tables, sampler = self._open()
        if not plan.prompts and not plan.decodes:
            return [], SampledTokens(tables.last_token[:0], [], [])
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
            return [], SampledTokens(inputs.slot_index, [], [])
        sampled = sampler.sample(logits, inputs.slots, inputs.slot_index, inputs.positions)
        tables.last_token[inputs.slot_index] = sampled.tokens
        return inputs.slots, sampled

    def device_cache(self) -> DeviceCache:
        return DeviceCache(tensor_rows(self.page_pool.rows))

    def close(self) -> None:
        self._model = self._tables = self._sampler = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _open(self) -> tuple[nn.Module, SlotTables, Sampler]:
        if self._model is None or self._tables is None or self._sampler is None:
            raise EngineError("The engine is closed.")
        return self._model, self._tables, self._sampler


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
    kv_dtype = _kv_dtype(settings, dtype)
    settings.check_layout(build_cache_layout(shapes, kv_dtype, loaded.config, ""))
    settings.report(f"loading {loaded.config.model_type} weights as {dtype} to {device}")
    with torch.inference_mode():
        model = load_model(loaded, model_dir, device, dtype, settings.load_format)
        vocab_size = probe_model(model, loaded, shapes, device)
        max_model_len = choose_context_length(settings.max_model_len, loaded.max_position)
        rope = f":{max_model_len}" if pin_rope(model, max_model_len, device) else ""
        exact = _make_exact(model, device) if settings.deterministic else None
    identity = "dummy" if settings.load_format == "dummy" else weights_identity(model_dir)
    info = EngineInfo(
        layout=build_cache_layout(shapes, kv_dtype, loaded.config, identity + rope),
        num_pages=0,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=tuple(t for t in loaded.eos_token_ids if t < vocab_size),
        pipeline_depth=0 if device.type == "cpu" else 1,
        device=str(device) if device.type == "cpu" else torch.cuda.get_device_name(device),
    )

    def open_engine(sized: EngineInfo) -> TorchEngine:
        pool = PagePool(sized.layout, sized.num_pages, device)
        return TorchEngine(model, pool, sized, device, exact)

    info = size_pools(settings, info, device, open_engine)
    with allocating_pools(info, device):
        return open_engine(info)


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
