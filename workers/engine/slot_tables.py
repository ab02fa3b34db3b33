"""What an engine keeps of each slot on the device between steps, and how a plan becomes a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from workers.attention.batch import Batch, BatchTensors, LogitRow, Segment

if TYPE_CHECKING:
    from collections.abc import Iterable

    from workers.attention.batch import StepUpload
    from workers.contract import PromptChunk, StepPlan


class PromptRows(NamedTuple):
    """Token and position of each row of a prompt step, and the length of each sequence after it."""

    token_ids: Tensor
    positions: Tensor
    ends: Tensor


class SlotRows(NamedTuple):
    slots: Tensor
    tokens: Tensor
    lengths: Tensor


class NewPages(NamedTuple):
    """Slot, block index and page of each block table that grew."""

    slots: Tensor
    blocks: Tensor
    pages: Tensor


@dataclass(frozen=True)
class TableUpdate:
    """What the host sends for a step. Tensors are int32 views of the step's upload."""

    batch: Batch
    slots: Tensor
    row_slots: Tensor
    logit_rows: Tensor
    block_tables: tuple[tuple[int, Tensor], ...]
    """(slot, its new block table) for each table that is replaced."""
    prompts: PromptRows | None = None
    """None: a decode step, whose tokens and positions are on the device already."""
    arrivals: SlotRows | None = None
    new_pages: NewPages | None = None


class SlotTables:
    """Block table, length and last token of every slot, and of a spare one for padding rows.

    The spare slot's length stays -1, so its rows have a position that no sequence has.
    """

    def __init__(self, max_num_seqs: int, max_pages: int, device: torch.device) -> None:
        slots = max_num_seqs + 1
        self.spare = max_num_seqs
        self.block_table = torch.zeros(slots, max_pages, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(slots, dtype=torch.int64, device=device)
        """Tokens of the slot's sequence whose KV is in the pool."""
        self.last_token = torch.zeros(slots, dtype=torch.int64, device=device)
        self._advance = torch.ones(slots, dtype=torch.int64, device=device)
        """What a decode adds to each length."""
        self.lengths[self.spare :] = -1
        self._advance[self.spare :] = 0

    def prepare(
        self, plan: StepPlan, upload: StepUpload, *, every_row: bool = False, padded_to: int = 0
    ) -> TableUpdate:
        """Do the host's part of a step, which must not be empty.

        Args:
            every_row: ask for the logits of all rows from `replay_from` on, not only of the sampled ones.
            padded_to: the least number of rows of a decode step. Rows of the spare slot fill it up; the
                host's batch does not mention them.
        """
        if plan.is_prompt:
            return self._prepare_prompts(plan, upload, every_row)
        return self._prepare_decodes(plan, upload, padded_to)

    def _prepare_prompts(self, plan: StepPlan, upload: StepUpload, every_row: bool) -> TableUpdate:
        chunks = plan.prompts
        segments, row = [], 0
        for chunk in chunks:
            count = len(chunk.tokens)
            segments.append(Segment(chunk.slot, row, chunk.start, count, chunk.replay_from))
            row += count
        if every_row:
            logit_rows = [
                LogitRow(i, position)
                for i, s in enumerate(segments)
                for position in range(max(s.start, s.replay_from), s.end)
            ]
        else:
            logit_rows = [
                LogitRow(i, s.end - 1)
                for i, (chunk, s) in enumerate(zip(chunks, segments, strict=True))
                if chunk.sample
            ]
        batch = Batch(plan, tuple(segments), tuple(logit_rows))
        counts = [s.rows for s in segments]
        slots = _words(s.slot for s in segments)
        return TableUpdate(
            batch=batch,
            slots=upload.put(slots),
            row_slots=upload.put(np.repeat(slots, counts)),
            logit_rows=_put_logit_rows(batch, upload),
            prompts=PromptRows(
                token_ids=upload.put(
                    np.concatenate([np.asarray(c.tokens, np.int32) for c in chunks])
                ),
                positions=upload.put(
                    np.concatenate([np.arange(s.start, s.end, dtype=np.int32) for s in segments])
                ),
                ends=upload.put(_words(s.end for s in segments)),
            ),
            block_tables=_put_block_tables(chunks, upload),
        )

    def _prepare_decodes(self, plan: StepPlan, upload: StepUpload, padded_to: int) -> TableUpdate:
        segments = tuple(
            Segment(row.slot, i, row.position, 1) for i, row in enumerate(plan.decodes)
        )
        logit_rows = tuple(LogitRow(i, s.start) for i, s in enumerate(segments))
        batch = Batch(plan, segments, logit_rows)
        padding = [self.spare] * max(0, padded_to - len(segments))
        slots = upload.put(np.array([row.slot for row in plan.decodes] + padding, np.int32))
        rows = upload.put(np.arange(len(slots), dtype=np.int32))
        # Last, as their sizes vary from step to step.
        arrivals = new_pages = None
        if plan.arrivals:
            arrivals = SlotRows(
                slots=upload.put(_words(c.slot for c in plan.arrivals)),
                tokens=upload.put(_words(int(c.tokens[0]) for c in plan.arrivals)),
                lengths=upload.put(_words(c.start for c in plan.arrivals)),
            )
        if plan.new_pages:
            grown = np.array(plan.new_pages, np.int32)
            new_pages = NewPages(*(upload.put(column) for column in grown.T))
        return TableUpdate(
            batch=batch,
            slots=slots,
            row_slots=slots,
            logit_rows=rows,
            block_tables=_put_block_tables(plan.arrivals, upload),
            arrivals=arrivals,
            new_pages=new_pages,
        )

    def apply(self, update: TableUpdate) -> BatchTensors:
        """Bring the tables up to date on the device. Call it once the upload is sent."""
        self.apply_changes(update)
        return self.advance(update)

    def apply_changes(self, update: TableUpdate) -> None:
        """Enter block tables that are new or grew, and sequences that arrive."""
        for slot, table in update.block_tables:
            self.block_table[slot, : len(table)] = table
        if update.arrivals is not None:
            arrived = update.arrivals.slots.long()
            self.last_token[arrived] = update.arrivals.tokens.long()
            self.lengths[arrived] = update.arrivals.lengths.long()
        if update.new_pages is not None:
            grown = update.new_pages
            self.block_table[grown.slots.long(), grown.blocks.long()] = grown.pages

    def advance(self, update: TableUpdate) -> BatchTensors:
        """Count the step's tokens and return its rows.

        For decodes it reads `update.slots` and `update.logit_rows` alone, so a graph can capture it.
        """
        slots = update.slots.long()
        if update.prompts is not None:
            token_ids, positions = update.prompts.token_ids.long(), update.prompts.positions.long()
            row_slots = update.row_slots.long()
            self.lengths[slots] = update.prompts.ends.long()
        else:
            token_ids, positions, row_slots = self.last_token[slots], self.lengths[slots], slots
            self.lengths[slots] = positions + self._advance[slots]
        return BatchTensors(
            token_ids=token_ids,
            positions=positions,
            row_slots=row_slots,
            slots=slots,
            logit_rows=update.logit_rows.long(),
            block_table=self.block_table,
        )


def _put_block_tables(
    chunks: tuple[PromptChunk, ...], upload: StepUpload
) -> tuple[tuple[int, Tensor], ...]:
    return tuple((c.slot, upload.put(np.asarray(c.pages, np.int32))) for c in chunks)


def _put_logit_rows(batch: Batch, upload: StepUpload) -> Tensor:
    segments = batch.segments
    return upload.put(
        _words(
            segments[row.segment].first_row + row.position - segments[row.segment].start
            for row in batch.logit_rows
        )
    )


def _words(numbers: Iterable[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.fromiter(numbers, np.int32)
