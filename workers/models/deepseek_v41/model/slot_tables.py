"""What the engine keeps of each slot between steps, and how a plan becomes a `Step`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from workers.engine.device import upload_int32
from workers.models.deepseek_v41.model.step import Segment, Step, StepBuilder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from workers.contract import PromptChunk, StepPlan
    from workers.models.deepseek_v41.engram.lookup import EngramLookup


@dataclass(frozen=True)
class PreparedStep:
    """One call of the model, and who gets the tokens sampled from its logits.

    Row i of the logits belongs to slot `slots[i]` and yields the token at position `positions[i]`.
    """

    step: Step
    slots: list[int]
    slot_index: Tensor
    """int64: the slots, on the device."""
    positions: list[int]


class SlotTables:
    """Per-slot tables. Positions are known on the host, so that no step waits for the device."""

    def __init__(
        self,
        builder: StepBuilder,
        engram: EngramLookup | None,
        max_num_seqs: int,
        max_pages: int,
        device: torch.device,
    ) -> None:
        self._builder = builder
        self._engram = engram
        self._device = device
        self._block_table = torch.zeros(max_num_seqs, max_pages, dtype=torch.int32, device=device)
        self._last_token = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._replay_from = [0] * max_num_seqs
        self._lengths = [0] * max_num_seqs
        self._collected = np.zeros(max_num_seqs, np.int64)

    def length(self, slot: int) -> int:
        """Tokens of the slot's sequence that launched steps have computed."""
        return self._lengths[slot]

    def prepare(self, plan: StepPlan, *, every_row: bool = False) -> PreparedStep:
        """Bring the tables up to date and build the step of `plan`.

        Args:
            plan: what to compute.
            every_row: ask for the logits of all rows that the decoder layers keep, not only of those
                that are sampled.
        """
        if plan.is_prompt:
            return self._prepare_prompts(plan.prompts, every_row)
        return self._prepare_decodes(plan)

    def sampled(self, prepared: PreparedStep, tokens: Tensor) -> None:
        """Remember the tokens, int64 on the device, that a step sampled."""
        self._last_token[prepared.slot_index] = tokens

    def collected(self, slots: list[int], tokens: Tensor) -> None:
        """Remember the same tokens once they are on the host."""
        self._collected[slots] = tokens.numpy()

    def force(self, slot: int, token: int) -> None:
        """Make `token` the next input of `slot`."""
        self._last_token[slot] = token
        self._collected[slot] = token

    def _prepare_prompts(self, chunks: tuple[PromptChunk, ...], every_row: bool) -> PreparedStep:
        segments = [
            Segment(c.slot, c.start, len(c.tokens), replay_from=c.replay_from) for c in chunks
        ]
        sampled = [(i, c) for i, c in enumerate(chunks) if c.sample]
        ids, slots, *tables = upload_int32(
            [
                np.concatenate([np.asarray(c.tokens, np.int32) for c in chunks]),
                np.array([c.slot for _, c in sampled], np.int32),
                *[np.asarray(c.pages, np.int32) for c in chunks],
            ],
            self._device,
        )
        for chunk, table in zip(chunks, tables, strict=True):
            self._block_table[chunk.slot, : len(chunk.pages)] = table
            self._replay_from[chunk.slot] = chunk.replay_from
            self._lengths[chunk.slot] = chunk.start + len(chunk.tokens)
        wanted = [(i, segments[i].end - 1) for i, _ in sampled]
        if every_row:
            wanted = [
                (i, position)
                for i, s in enumerate(segments)
                for position in range(max(s.start, s.replay_from), s.end)
            ]
        step = self._builder.build(
            segments, ids.long(), self._block_table, wanted, self._prompt_embeddings(chunks)
        )
        return PreparedStep(
            step=step,
            slots=[c.slot for _, c in sampled],
            slot_index=slots.long(),
            positions=[c.start + len(c.tokens) for _, c in sampled],
        )

    def _prompt_embeddings(self, chunks: tuple[PromptChunk, ...]) -> Mapping[int, Tensor]:
        if self._engram is None:
            return {}
        for chunk in chunks:
            if chunk.begin:
                known = chunk.tokens if chunk.history is None else chunk.history
                self._engram.begin(chunk.slot, np.asarray(known, np.int32), chunk.start)
        return self._engram.prompts(
            [(c.slot, c.start, np.asarray(c.tokens, np.int32)) for c in chunks]
        )

    def _prepare_decodes(self, plan: StepPlan) -> PreparedStep:
        rows = plan.decodes
        grown = np.array(plan.new_pages, np.int32).reshape(-1, 3)
        index, grown_slots, grown_blocks, grown_pages = upload_int32(
            [np.array([r.slot for r in rows], np.int32), *np.ascontiguousarray(grown.T)],
            self._device,
        )
        if len(plan.new_pages):
            self._block_table[grown_slots.long(), grown_blocks.long()] = grown_pages
        slots = [r.slot for r in rows]
        for row in rows:
            self._lengths[row.slot] = row.position + 1
        segments = [
            Segment(r.slot, r.position, 1, replay_from=self._replay_from[r.slot]) for r in rows
        ]
        embeddings: Mapping[int, Tensor] = {}
        if self._engram is not None:
            embeddings = self._engram.decodes(slots, torch.from_numpy(self._collected[slots]))
        step = self._builder.build(
            segments,
            self._last_token[index.long()],
            self._block_table,
            [(i, r.position) for i, r in enumerate(rows)],
            embeddings,
        )
        return PreparedStep(step, slots, index.long(), [r.position + 1 for r in rows])
