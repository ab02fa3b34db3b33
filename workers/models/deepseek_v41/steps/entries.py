"""Which entries of the global KV a step completes, and where their tokens and their places are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from workers.attention.row_tiles import Tile, position_tiles
from workers.contract import PAGE_TOKENS
from workers.models.deepseek_v41.layout.row_layout import entries_per_page
from workers.models.deepseek_v41.steps.rows import Span, ragged_arange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from workers.attention.batch import IntArray, StepUpload


@dataclass(frozen=True)
class CompressedEntries:
    """Entries of one ratio that a step completes: G entries of `ratio` tokens, with a tail ring of R."""

    ratio: int
    positions: Tensor
    """int64 [G]: position of each entry's first token."""
    members: Tensor
    """int64 [G,ratio]: its tokens, among B*R places of tails followed by the step's rows."""
    page: Tensor
    """int64 [G]."""
    place: Tensor
    """int64 [G]: index of the entry in its page."""
    tail_rows: Tensor
    """int64 [N]: rows that go into the tail ring."""
    tail_slot: Tensor
    """int64 [N]."""
    tail_place: Tensor
    """int64 [N]."""
    tiles: list[Tile] | None
    """None: results may depend on the batch."""


def entry_runs(spans: Sequence[Span], ratio: int, store_from: Sequence[int]) -> IntArray:
    """[B,2]: first entry and number of entries that each sequence completes in this step.

    The last token of an entry completes it. Entries of tokens before `store_from` are in the pages already
    and are not made again.
    """
    first = [
        max(s.start // ratio, -(-low // ratio)) for s, low in zip(spans, store_from, strict=True)
    ]
    return np.array(
        [(f, max(0, s.end // ratio - f)) for f, s in zip(first, spans, strict=True)], np.int32
    ).reshape(-1, 2)


@dataclass(frozen=True)
class EntryInputs:
    """The host's part of `CompressedEntries`. Tensors are int32 views of the step's upload."""

    ratio: int
    entry: Tensor
    """[G]: number of the entry in its sequence."""
    sequence: Tensor
    """[G]: index of its sequence in the step."""
    members: Tensor
    """[G * ratio]."""
    tail_rows: Tensor
    tail_slot: Tensor
    tail_place: Tensor
    tiles: list[Tile] | None

    @classmethod
    def put(
        cls,
        spans: Sequence[Span],
        ratio: int,
        tail_ring: int,
        store_from: Sequence[int],
        upload: StepUpload,
        *,
        batch_invariant: bool,
    ) -> EntryInputs:
        runs = entry_runs(spans, ratio, store_from)
        entry = ragged_arange(runs[:, 0], runs[:, 1])
        sequence = np.repeat(np.arange(len(spans), dtype=np.int32), runs[:, 1])
        start, first_row, count, slot = (
            np.array([getattr(s, name) for s in spans], np.int32)
            for name in ("start", "first_row", "rows", "slot")
        )
        token = entry[:, None] * ratio + np.arange(ratio, dtype=np.int32)
        own = len(spans) * tail_ring + (first_row - start)[sequence][:, None] + token
        tail = sequence[:, None] * tail_ring + token % max(1, tail_ring)
        members = np.where(token >= start[sequence][:, None], own, tail)
        kept = np.minimum(count, tail_ring).astype(np.int32)
        tail_rows = ragged_arange(first_row + count - kept, kept)
        tail_positions = ragged_arange(start + count - kept, kept)
        tiles = None
        if batch_invariant:  # by entry number
            tiles = position_tiles([(int(first), int(number)) for first, number in runs])
        return cls(
            ratio=ratio,
            entry=upload.put(entry),
            sequence=upload.put(sequence),
            members=upload.put(members.astype(np.int32).ravel()),
            tail_rows=upload.put(tail_rows),
            tail_slot=upload.put(np.repeat(slot, kept)),
            tail_place=upload.put(tail_positions % max(1, tail_ring)),
            tiles=tiles,
        )

    def entries(self, block_tables: Tensor) -> CompressedEntries:
        """Do the device's part, once the upload is sent. `block_tables` is int64 [B,P]."""
        entry = self.entry.long()
        positions = entry * self.ratio
        return CompressedEntries(
            ratio=self.ratio,
            positions=positions,
            members=self.members.long().view(-1, self.ratio),
            page=block_tables[self.sequence.long(), positions // PAGE_TOKENS],
            place=entry % entries_per_page(self.ratio),
            tail_rows=self.tail_rows.long(),
            tail_slot=self.tail_slot.long(),
            tail_place=self.tail_place.long(),
            tiles=self.tiles,
        )
