"""The engine: any `ServedModel` over PyTorch, on a CPU or one CUDA GPU.

On a GPU `launch` only enqueues work: what the host knows of a step travels in one copy, tokens stay in
per-slot tables, and `collect` waits for one event a step. On a CPU `launch` computes and `collect` hands out
the result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from hicache.copies.cache_copies import DeviceCache
from hicache.copies.cuda.rows import tensor_rows
from workers.contract import DecodeRow, EngineError, EngineInfo, StepPlan
from workers.engine.decode_graphs import DecodeGraphs, DecodeOutput, padded_sizes
from workers.engine.memory_plan import pages_for
from workers.engine.running_step import RunningStep, StepRunner
from workers.engine.slot_tables import SlotTables
from workers.engine.step_buffers import StepBuffers
from workers.models.served_model import ServedModel
from workers.sampling.sampler import SampledTokens, Sampler


class _Parts:
    """What an engine holds while it is open."""

    def __init__(
        self, model: ServedModel, info: EngineInfo, device: torch.device, max_batched_tokens: int
    ) -> None:
        max_pages = pages_for(info.max_model_len, info.layout.page_tokens)
        self.model = model
        self.tables = SlotTables(info.max_num_seqs, max_pages, device)
        self.sampler = Sampler(info.max_num_seqs, info.vocab_size, info.eos_token_ids, device)
        self.buffers = StepBuffers(
            device, info.pipeline_depth, max_batched_tokens, info.max_num_seqs, max_pages
        )
        self.graphs = DecodeGraphs()


def _padding_step(parts: _Parts, size: int) -> Callable[[], DecodeOutput]:
    """Ready a decode step that consists of padding rows alone."""
    plan = StepPlan(0, decodes=(DecodeRow(parts.tables.spare, -1),) * size)
    parts.buffers.begin()
    update = parts.tables.prepare(plan, parts.buffers)
    parts.model.prepare(update.batch, parts.buffers)
    parts.buffers.send()

    def compute() -> DecodeOutput:
        tensors = parts.tables.advance(update)
        logits = parts.model.forward(tensors)
        assert logits is not None
        tokens = logits.argmax(-1)
        parts.tables.last_token[tensors.slots] = tokens
        return DecodeOutput(logits, tokens)

    return compute


class ModelEngine:
    """Implements `workers.contract.Engine`. Build one with `create_engine`."""

    def __init__(
        self,
        model: ServedModel,
        info: EngineInfo,
        device: torch.device,
        max_batched_tokens: int,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_close` is called once, after the engine has let go of the model."""
        self._info = info
        self._on_close = on_close
        self._device = device
        self._parts: _Parts | None = _Parts(model, info, device, max_batched_tokens)
        self._runner = StepRunner(device, info.pipeline_depth, info.max_num_seqs, self._collected)

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def model(self) -> ServedModel:
        """Raises `EngineError` if the engine is closed."""
        return self._open().model

    def launch(self, plan: StepPlan) -> RunningStep:
        parts = self._open()
        return self._runner.launch(plan.step, lambda: self._compute(parts, plan))

    def capture_decodes(self, report: Callable[[str], None]) -> None:
        """Make decode steps fast, where the model and the device allow it. Call it before the first step."""
        parts = self._open()
        if self._device.type != "cuda" or not parts.model.captures_decodes:
            return
        sizes = padded_sizes(self._info.max_num_seqs)
        with torch.inference_mode():
            parts.graphs.capture(sizes, partial(_padding_step, parts), report)

    def _compute(self, parts: _Parts, plan: StepPlan) -> tuple[list[int], SampledTokens]:
        if not plan.prompts and not plan.decodes:
            return [], SampledTokens(parts.tables.last_token[:0], [], [])
        parts.buffers.begin()
        padded = 0 if plan.is_prompt else parts.graphs.padded(len(plan.decodes))
        update = parts.tables.prepare(plan, parts.buffers, padded_to=padded)
        segments, rows = update.batch.segments, update.batch.logit_rows
        parts.model.prepare(update.batch, parts.buffers)
        slots = [segments[row.segment].slot for row in rows]
        # Last: its size depends on what requests ask for.
        sampling = parts.sampler.prepare(
            plan.prompts + plan.arrivals, slots, [row.position + 1 for row in rows], parts.buffers
        )
        parts.buffers.send()
        if padded:
            parts.tables.apply_changes(update)
            output = parts.graphs.replay(padded)
            if sampling.only_greedy:
                return slots, SampledTokens(output.tokens[: len(slots)], [], [])
            sampled = parts.sampler.sample(sampling, output.logits[: len(slots)])
        else:
            sampled = parts.sampler.sample(
                sampling, parts.model.forward(parts.tables.apply(update))
            )
        if slots:
            parts.tables.last_token[sampling.slots.long()] = sampled.tokens
        return slots, sampled

    def _collected(self, step: RunningStep) -> None:
        if self._parts is not None:
            self._parts.model.collected(step.slots, step.sampled.tokens)

    def logits(self, plan: StepPlan) -> Tensor:
        """Compute a step without sampling.

        Returns the logits [rows,vocab_size] of every row from `PromptChunk.replay_from` on, on the device.
        Meant for checking a model. A decode after it continues with the token given to `force_token`.
        """
        parts = self._open()
        with torch.inference_mode():
            parts.buffers.begin()
            update = parts.tables.prepare(plan, parts.buffers, every_row=True)
            parts.model.prepare(update.batch, parts.buffers)
            parts.buffers.send()
            logits = parts.model.forward(parts.tables.apply(update))
            if self._device.type == "cuda":  # nobody else waits before the buffers are filled anew
                torch.cuda.synchronize(self._device)
        if logits is None:
            return torch.empty(0, self._info.vocab_size, device=self._device)
        return logits

    def force_token(self, slot: int, token: int) -> None:
        parts = self._open()
        with torch.inference_mode():
            parts.tables.last_token[slot] = token
        parts.model.collected([slot], torch.tensor([token]))

    def device_cache(self) -> DeviceCache:
        model = self.model
        return DeviceCache(tensor_rows(model.pages), model.states)

    def close(self) -> None:
        if self._parts is None:
            return
        self._parts = None
        self._on_close()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _open(self) -> _Parts:
        if self._parts is None:
            raise EngineError("The engine is closed.")
        return self._parts
