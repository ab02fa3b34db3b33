"""From a `StepPlan` to the tensors of one model call, and the per-slot tables on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from workers.attention.paged import AttentionStep, DecodeStep, PagePool, Segment, SegmentedStep
from workers.contract import PAGE_TOKENS
from workers.engine.device import upload_int32

if TYPE_CHECKING:
    from workers.contract import DecodeRow, PromptChunk, StepPlan


@dataclass(frozen=True)
class ModelInputs:
    """All that one call of the model needs, and which of its rows are sampled.

    Sampled row i belongs to slot `slots[i]` and yields the token at position `positions[i]`.
    """

    input_ids: Tensor
    """[1,T]."""
    position_ids: Tensor
    """int64 [1,T]."""
    attention: AttentionStep
    sample_rows: Tensor
    """int64 [R]: rows of the flattened batch whose logits are needed."""
    slot_index: Tensor
    """int64 [R]: the slots, on the device."""
    slots: list[int]
    positions: list[int]


class SlotTables:
    """Per-slot state that stays on the device between steps."""

    def __init__(self, max_num_seqs: int, max_pages: int, pool: PagePool) -> None:
        device = pool.rows.device
        self.pool = pool
        self.device = device
        self.block_table = torch.zeros(max_num_seqs, max_pages, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        """Tokens of the slot's sequence whose KV is in the pool."""
        self.last_token = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    def prepare(self, plan: StepPlan) -> ModelInputs:
        """Bring the tables up to date with `plan` and build the inputs of its model call."""
        if plan.is_prompt:
            return self._prepare_prompts(plan.prompts)
        return self._prepare_decodes(plan)

    def _prepare_prompts(self, chunks: tuple[PromptChunk, ...]) -> ModelInputs:
        positions = [_span(c.start, len(c.tokens)) for c in chunks]
        write_pages = [
            np.asarray(c.pages, np.int32)[p // PAGE_TOKENS]
            for c, p in zip(chunks, positions, strict=True)
        ]
        flat_positions = np.concatenate(positions)
        ends = np.cumsum([len(c.tokens) for c in chunks])
        sampled = [(c, int(end) - 1) for c, end in zip(chunks, ends, strict=True) if c.sample]
        ids, where, pages, offsets, slots, lengths, rows, row_slots, *tables = upload_int32(
            [
                np.concatenate([np.asarray(c.tokens, np.int32) for c in chunks]),
                flat_positions,
                np.concatenate(write_pages),
                flat_positions % PAGE_TOKENS,
                np.array([c.slot for c in chunks], np.int32),
                np.array([c.start + len(c.tokens) for c in chunks], np.int32),
                np.array([row for _, row in sampled], np.int32),
                np.array([c.slot for c, _ in sampled], np.int32),
                *[np.asarray(c.pages, np.int32) for c in chunks],
            ],
            self.device,
        )
        for chunk, table in zip(chunks, tables, strict=True):
            self.block_table[chunk.slot, : len(chunk.pages)] = table
        self.lengths[slots.long()] = lengths.long()
        segments = [
            Segment(int(end) - len(c.tokens), len(c.tokens), c.start, self.block_table[c.slot])
            for c, end in zip(chunks, ends, strict=True)
        ]
        return ModelInputs(
            input_ids=ids.long()[None],
            position_ids=where.long()[None],
            attention=SegmentedStep(self.pool, segments, pages.long(), offsets.long()),
            sample_rows=rows.long(),
            slot_index=row_slots.long(),
            slots=[c.slot for c, _ in sampled],
            positions=[c.start + len(c.tokens) for c, _ in sampled],
        )

    def _prepare_decodes(self, plan: StepPlan) -> ModelInputs:
        rows = plan.decodes
        grown = np.array(plan.new_pages, np.int32).reshape(-1, 3)
        slots, grown_slots, grown_blocks, grown_pages = upload_int32(
            [np.array([r.slot for r in rows], np.int32), *np.ascontiguousarray(grown.T)],
            self.device,
        )
        slots = slots.long()
        if len(plan.new_pages):
            self.block_table[grown_slots.long(), grown_blocks.long()] = grown_pages
        positions = self.lengths[slots]
        self.lengths[slots] = positions + 1
        return ModelInputs(
            input_ids=self.last_token[slots][None],
            position_ids=positions[None],
            attention=self._decode_attention(rows, slots, positions),
            sample_rows=torch.arange(len(rows), device=self.device),
            slot_index=slots,
            slots=[r.slot for r in rows],
            positions=[r.position + 1 for r in rows],
        )

    def _decode_attention(
        self, rows: tuple[DecodeRow, ...], slots: Tensor, positions: Tensor
    ) -> AttentionStep:
        tables = self.block_table[slots]
        pages = tables.gather(1, positions[:, None] // PAGE_TOKENS)[:, 0].long()
        offsets = positions % PAGE_TOKENS
        if self.device.type == "cpu":
            segments = [
                Segment(i, 1, row.position, self.block_table[row.slot])
                for i, row in enumerate(rows)
            ]
            return SegmentedStep(self.pool, segments, pages, offsets)
        width = max(row.position for row in rows) // PAGE_TOKENS + 1
        return DecodeStep(self.pool, tables, positions, width, pages, offsets)


def _span(start: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.arange(start, start + count, dtype=np.int32)
