"""The engine for DeepSeek-V4.1: `Engine` over this package's model, on a CPU or one CUDA GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hicache.copies.cache_copies import DeviceCache
from hicache.copies.cuda.rows import tensor_rows
from workers.contract import EngineError, EngineInfo, StepPlan
from workers.engine.memory_plan import pages_for
from workers.engine.running_step import RunningStep, StepRunner
from workers.models.deepseek_v41.cache.states import SlotStates
from workers.models.deepseek_v41.model.slot_tables import PreparedStep, SlotTables
from workers.models.deepseek_v41.model.step import StepBuilder
from workers.sampling.sampler import SampledTokens, Sampler

if TYPE_CHECKING:
    from workers.models.deepseek_v41.cache.pools import ServingCaches
    from workers.models.deepseek_v41.engram.lookup import EngramLookup
    from workers.models.deepseek_v41.model.model import DeepseekV41


class DeepseekV41Engine:
    """See `workers.contract.Engine`. Made by `create_deepseek_v41_engine`."""

    def __init__(
        self,
        model: DeepseekV41,
        caches: ServingCaches,
        engram: EngramLookup | None,
        info: EngineInfo,
        device: torch.device,
        *,
        exact: bool,
    ) -> None:
        self._info = info
        self._device = device
        self._model: DeepseekV41 | None = model
        self._caches = caches
        self._engram = engram
        self._tables = SlotTables(
            StepBuilder(model.config, caches.layout, exact=exact),
            engram,
            info.max_num_seqs,
            pages_for(info.max_model_len, info.layout.page_tokens),
            device,
        )
        self._sampler = Sampler(info.max_num_seqs, info.vocab_size, info.eos_token_ids, device)
        self._runner = StepRunner(device, info.pipeline_depth, self._collected)

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def caches(self) -> ServingCaches:
        """The pools, for those who copy pages and states in and out of them.

        Raises:
            EngineError: the engine is closed.
        """
        self._open()
        return self._caches

    def launch(self, plan: StepPlan) -> RunningStep:
        """See `Engine.launch`.

        Raises:
            EngineError: the engine is closed, has too many steps running, or the device failed.
        """
        return self._runner.launch(plan.step, lambda: self._compute(plan))

    def _compute(self, plan: StepPlan) -> tuple[list[int], SampledTokens]:
        model = self._open()
        if not plan.prompts and not plan.decodes:
            return [], SampledTokens(torch.empty(0, dtype=torch.int64), [], [])
        self._sampler.observe(plan.prompts)
        prepared = self._tables.prepare(plan)
        logits = model(prepared.step, self._caches)
        return prepared.slots, self._sample(prepared, logits)

    def _sample(self, prepared: PreparedStep, logits: Tensor | None) -> SampledTokens:
        if logits is None or not prepared.slots:
            return SampledTokens(prepared.slot_index, [], [])
        sampled = self._sampler.sample(
            logits, prepared.slots, prepared.slot_index, prepared.positions
        )
        self._tables.sampled(prepared, sampled.tokens)
        return sampled

    def _collected(self, step: RunningStep) -> None:
        if self._model is not None:
            self._tables.collected(step.slots, step.sampled.tokens)

    def logits(self, plan: StepPlan) -> Tensor:
        """Compute a step without sampling: logits, float32 [rows,vocab_size] on the device.

        A prompt step yields a row for every token that the decoder layers run on. For checks of the
        model; a decode after it continues with the token given to `force_token`.
        """
        model = self._open()
        with torch.inference_mode():
            prepared = self._tables.prepare(plan, every_row=True)
            logits = model(prepared.step, self._caches)
        if logits is None:
            return torch.empty(0, self._info.vocab_size, device=self._device)
        assert isinstance(logits, Tensor)
        return logits

    def force_token(self, slot: int, token: int) -> None:
        """Make `token` the next input of `slot`, as if it had been sampled."""
        with torch.inference_mode():
            self._tables.force(slot, token)

    def device_cache(self) -> DeviceCache:
        return DeviceCache(
            tensor_rows(self.caches.pages), SlotStates(self._caches, self._tables.length)
        )

    def close(self) -> None:
        if self._model is None:
            return
        self._model = None
        if self._engram is not None:
            self._engram.close()
        del self._caches, self._tables, self._sampler
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _open(self) -> DeepseekV41:
        if self._model is None:
            raise EngineError("The engine is closed.")
        return self._model
