"""DeepSeek-V4.1 with its caches, as the engine sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from workers.models.deepseek_v41.cache.states import SlotStates
from workers.models.deepseek_v41.steps.step import StepBuilder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from workers.attention.batch import Batch, BatchTensors, StepUpload
    from workers.contract import PromptChunk
    from workers.models.deepseek_v41.cache.pools import Caches
    from workers.models.deepseek_v41.engram.lookup import EngramLookup
    from workers.models.deepseek_v41.model.model import DeepseekV41
    from workers.models.deepseek_v41.steps.step import StepInputs


class ServedDeepseekV41:
    """Implements `ServedModel`. The host knows all positions, so no step waits for the device."""

    captures_decodes = False

    def __init__(
        self,
        network: DeepseekV41,
        caches: Caches,
        engram: EngramLookup | None,
        *,
        batch_invariant: bool,
    ) -> None:
        self.network = network
        self.caches = caches
        self.engram = engram
        self._builder = StepBuilder(network.config, caches.layout, batch_invariant=batch_invariant)
        slots = len(caches.states)
        self._replay_from = [0] * slots
        self._lengths = [0] * slots
        self._collected = np.zeros(slots, np.int64)
        """The last token of each slot, which decodes look up Engram rows from."""
        self._inputs: StepInputs | None = None

    @property
    def pages(self) -> Tensor:
        return self.caches.pages

    @property
    def states(self) -> SlotStates:
        return SlotStates(self.caches, self._lengths.__getitem__)

    def prepare(self, batch: Batch, upload: StepUpload) -> None:
        plan, segments = batch.plan, batch.segments
        for segment in segments:
            self._lengths[segment.slot] = segment.end
        for chunk in (*plan.prompts, *plan.arrivals):
            self._replay_from[chunk.slot] = chunk.replay_from
            if chunk.begin and self.engram is not None:
                known = chunk.tokens if chunk.history is None else chunk.history
                self.engram.begin(chunk.slot, np.asarray(known, np.int32), chunk.start)
        if plan.is_prompt:
            embeddings = self._prompt_embeddings(plan.prompts)
        else:
            for chunk in plan.arrivals:
                self._collected[chunk.slot] = chunk.tokens[0]
            segments = tuple(s._replace(replay_from=self._replay_from[s.slot]) for s in segments)
            embeddings = self._decode_embeddings([s.slot for s in segments])
        self._inputs = self._builder.prepare(segments, batch.logit_rows, embeddings, upload)

    def _prompt_embeddings(self, chunks: tuple[PromptChunk, ...]) -> Mapping[int, Tensor]:
        if self.engram is None:
            return {}
        return self.engram.prompts(
            [(c.slot, c.start, np.asarray(c.tokens, np.int32)) for c in chunks]
        )

    def _decode_embeddings(self, slots: list[int]) -> Mapping[int, Tensor]:
        if self.engram is None:
            return {}
        return self.engram.decodes(slots, torch.from_numpy(self._collected[slots]))

    def forward(self, tensors: BatchTensors) -> Tensor | None:
        # Let go of them with the step: Engram rows of a long chunk take much memory.
        inputs, self._inputs = self._inputs, None
        assert inputs is not None, "a step runs that was not prepared"
        logits: Tensor | None = self.network(inputs.step(tensors), self.caches)
        return logits

    def collected(self, slots: list[int], tokens: Tensor) -> None:
        self._collected[slots] = tokens.numpy()
