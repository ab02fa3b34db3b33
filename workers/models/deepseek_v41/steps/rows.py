"""The rows of a step: which token of which sequence each is, and where its window keys are.

A step is a flattened batch without padding: the rows of a sequence are consecutive, the sequences
follow each other. The decoder layers may run on fewer rows than the encoder layers (bounded replay),
so a step has one `Rows` for each of the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from workers.attention.row_tiles import RowFunction, Tile, map_rows, position_tiles

if TYPE_CHECKING:
    from workers.attention.batch import IntArray, StepUpload


class Span(NamedTuple):
    """Consecutive rows of one sequence, at positions start .. start+count-1."""

    slot: int
    first_row: int
    start: int
    rows: int
    """Number of rows."""
    window_from: int
    """First position that a window may look at; 0 unless earlier window KV is missing on purpose."""

    @property
    def end(self) -> int:
        return self.start + self.rows


@dataclass(frozen=True)
class Rows:
    """Rows of one part of the model, on the device: T rows of B sequences, window W, ring R."""

    spans: tuple[Span, ...]
    positions: Tensor
    """int64 [T]."""
    sequence: Tensor
    """int64 [T]: index of the row's sequence in the step."""
    history_place: Tensor
    """int64 [B,W-1]: ring places of the W-1 positions before each sequence's first row."""
    window_index: Tensor
    """int64 [T,W]: the row's window keys among B*(W-1) earlier ones followed by the T own ones."""
    window_valid: Tensor
    """bool [T,W]."""
    written_rows: Tensor
    """int64 [N]: rows that go into the ring; older ones of the same step would be overwritten."""
    written_slot: Tensor
    """int64 [N]."""
    written_place: Tensor
    """int64 [N]: position modulo R."""
    tiles: list[Tile] | None
    """None: results may depend on the batch."""

    def __len__(self) -> int:
        return len(self.positions)

    def map(
        self,
        function: RowFunction,
        *inputs: Tensor,
        limit: int | None = None,
    ) -> tuple[Tensor, ...]:
        return map_rows(function, inputs, self.tiles, limit)


@dataclass(frozen=True)
class RowInputs:
    """The host's part of `Rows`. Tensors are int32 views of the step's upload."""

    spans: tuple[Span, ...]
    window: int
    ring: int
    positions: Tensor
    sequence: Tensor
    first_row: Tensor
    """[B]."""
    start: Tensor
    """[B]."""
    window_from: Tensor
    """[B]."""
    written_rows: Tensor
    written_slot: Tensor
    written_place: Tensor
    tiles: list[Tile] | None

    @classmethod
    def put(
        cls,
        spans: tuple[Span, ...],
        window: int,
        ring: int,
        upload: StepUpload,
        *,
        batch_invariant: bool,
    ) -> RowInputs:
        counts = np.array([s.rows for s in spans], np.int32)
        kept = np.minimum(counts, ring)
        slots = np.array([s.slot for s in spans], np.int32)
        first = np.array([s.first_row for s in spans], np.int32)
        start = np.array([s.start for s in spans], np.int32)
        written = ragged_arange(first + counts - kept, kept)
        positions = ragged_arange(start, counts)
        return cls(
            spans=spans,
            window=window,
            ring=ring,
            positions=upload.put(positions),
            sequence=upload.put(np.repeat(np.arange(len(spans), dtype=np.int32), counts)),
            first_row=upload.put(first),
            start=upload.put(start),
            window_from=upload.put(np.array([s.window_from for s in spans], np.int32)),
            written_rows=upload.put(written),
            written_slot=upload.put(np.repeat(slots, kept)),
            written_place=upload.put(positions[written] % ring),
            tiles=position_tiles([(s.start, s.rows) for s in spans]) if batch_invariant else None,
        )

    @property
    def count(self) -> int:
        return len(self.positions)

    def rows(self) -> Rows:
        positions, sequence, start = (x.long() for x in (self.positions, self.sequence, self.start))
        before = self.window - 1
        back = torch.arange(-before, 1, device=positions.device)
        seen = positions[:, None] + back
        from_start = seen - start[sequence][:, None]
        own = self.first_row.long()[sequence][:, None] + from_start + len(self.spans) * before
        earlier = sequence[:, None] * before + from_start + before
        return Rows(
            spans=self.spans,
            positions=positions,
            sequence=sequence,
            history_place=(start[:, None] + back[:-1]) % self.ring,
            window_index=torch.where(from_start >= 0, own, earlier),
            window_valid=seen >= self.window_from.long()[sequence][:, None],
            written_rows=self.written_rows.long(),
            written_slot=self.written_slot.long(),
            written_place=self.written_place.long(),
            tiles=self.tiles,
        )


def ragged_arange(starts: IntArray, counts: IntArray) -> IntArray:
    """starts[0], starts[0]+1, ... (counts[0] of them), then the same for the next start."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int32) + np.repeat(
        (starts - ends + counts).astype(np.int32), counts
    )
