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
    from workers.contract import StepPlan


class Arrival(NamedTuple):
    """A slot whose sequence was computed elsewhere up to the input of its first decode."""

    slot: int
    pages: Tensor
    """Its block table."""
    length_and_token: Tensor
    """[2]: tokens whose KV is in the pool, and the one after them."""


@dataclass(frozen=True)
class TableUpdate:
    """What the host sends of a step: int32 views of the step's upload."""

    batch: Batch
    slots: Tensor
    row_slots: Tensor
    logit_rows: Tensor
    token_ids: Tensor | None = None
    """Of a prompt step, as are the following; None: they are on the device already."""
    positions: Tensor | None = None
    ends: Tensor | None = None
    pages: tuple[Tensor, ...] = ()
    """Block tables of the chunks."""
    arrivals: tuple[Arrival, ...] = ()
    """Of a decode step."""
    new_pages: tuple[Tensor, Tensor, Tensor] | None = None
    """Of a decode step: slot, block index and page of each block table that grew."""


class SlotTables:
    """Block table, length and last token of every slot."""

    def __init__(self, max_num_seqs: int, max_pages: int, device: torch.device) -> None:
        self.block_table = torch.zeros(max_num_seqs, max_pages, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        """Tokens of the slot's sequence whose KV is in the pool."""
        self.last_token = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    def prepare(
        self, plan: StepPlan, upload: StepUpload, *, every_row: bool = False
    ) -> TableUpdate:
        """The host's part of a step that is not empty.

        Args:
            plan: the step.
            upload: where to put what the device must know.
            every_row: ask for the logits of all rows from `replay_from` on, not only of the sampled ones.
        """
        if plan.is_prompt:
            return self._prepare_prompts(plan, upload, every_row)
        return self._prepare_decodes(plan, upload)

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
            token_ids=upload.put(np.concatenate([np.asarray(c.tokens, np.int32) for c in chunks])),
            positions=upload.put(
                np.concatenate([np.arange(s.start, s.end, dtype=np.int32) for s in segments])
            ),
            ends=upload.put(_words(s.end for s in segments)),
            pages=tuple(upload.put(np.asarray(c.pages, np.int32)) for c in chunks),
        )

    def _prepare_decodes(self, plan: StepPlan, upload: StepUpload) -> TableUpdate:
        segments = tuple(
            Segment(row.slot, i, row.position, 1) for i, row in enumerate(plan.decodes)
        )
        logit_rows = tuple(LogitRow(i, s.start) for i, s in enumerate(segments))
        batch = Batch(plan, segments, logit_rows)
        slots = upload.put(_words(s.slot for s in segments))
        rows = _put_logit_rows(batch, upload)
        # Last what varies in size from step to step.
        arrivals = tuple(
            Arrival(
                chunk.slot,
                upload.put(np.asarray(chunk.pages, np.int32)),
                upload.put(_words((chunk.start, int(chunk.tokens[0])))),
            )
            for chunk in plan.arrivals
        )
        new_pages = None
        if plan.new_pages:
            grown = np.array(plan.new_pages, np.int32)
            new_pages = (
                upload.put(grown[:, 0]), upload.put(grown[:, 1]), upload.put(grown[:, 2])
            )  # fmt: skip
        return TableUpdate(batch, slots, slots, rows, arrivals=arrivals, new_pages=new_pages)

    def apply(self, update: TableUpdate) -> BatchTensors:
        """The device's part, once the upload is sent: bring the tables up to date."""
        slots = update.slots.long()
        if update.token_ids is None or update.positions is None or update.ends is None:
            if update.new_pages is not None:
                grown_slots, blocks, pages = update.new_pages
                self.block_table[grown_slots.long(), blocks.long()] = pages
            for slot, pages, (length, token) in update.arrivals:
                self.block_table[slot, : len(pages)] = pages
                self.lengths[slot], self.last_token[slot] = length, token
            token_ids, positions, row_slots = self.last_token[slots], self.lengths[slots], slots
            self.lengths[slots] = positions + 1
        else:
            for segment, table in zip(update.batch.segments, update.pages, strict=True):
                self.block_table[segment.slot, : len(table)] = table
            token_ids, positions = update.token_ids.long(), update.positions.long()
            row_slots = update.row_slots.long()
            self.lengths[slots] = update.ends.long()
        return BatchTensors(
            token_ids=token_ids,
            positions=positions,
            row_slots=row_slots,
            slots=slots,
            logit_rows=update.logit_rows.long(),
            block_table=self.block_table,
        )


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
