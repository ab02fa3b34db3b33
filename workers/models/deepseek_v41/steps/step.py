"""From sequences and positions to the tensors of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from workers.attention.row_tiles import Tile, position_tiles
from workers.contract import PAGE_TOKENS
from workers.models.deepseek_v41.steps.entries import EntryInputs
from workers.models.deepseek_v41.steps.rows import RowInputs, Rows, Span, ragged_arange

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from workers.attention.batch import BatchTensors, IntArray, LogitRow, Segment, StepUpload
    from workers.models.deepseek_v41.config.model_config import ModelConfig
    from workers.models.deepseek_v41.layout.row_layout import RowLayout
    from workers.models.deepseek_v41.steps.entries import CompressedEntries


@dataclass(frozen=True)
class Step:
    """All that the model needs to know of one step: T rows of B sequences, R rows with logits."""

    token_ids: Tensor
    """int64 [T]."""
    slots: Tensor
    """int64 [B]."""
    block_tables: Tensor
    """int64 [B,P]."""
    encoder: Rows
    decoder: Rows | None
    """None: no row of this step runs through the decoder layers."""
    decoder_rows: Tensor | None
    """int64: rows of the encoder that the decoder keeps; None: all."""
    entries: Mapping[int, CompressedEntries]
    """Keyed by ratio."""
    logit_rows: Tensor
    """int64 [R]: rows of the decoder."""
    logit_tiles: list[Tile] | None
    """None: results may depend on the batch."""
    engram: Mapping[int, Tensor]
    """Keyed by layer: the table rows of each token, [T, rows * head_dim]."""

    def embeddings(self, layer: int, rows: Rows) -> Tensor | None:
        found = self.engram.get(layer)
        if found is None or rows is self.encoder or self.decoder_rows is None:
            return found
        return found[self.decoder_rows]


@dataclass(frozen=True)
class StepInputs:
    """The host's part of a step, from `StepBuilder.prepare`. Tensors are int32 views of the step's upload."""

    encoder: RowInputs
    decoder: RowInputs
    entries: tuple[EntryInputs, ...]
    decoder_rows: Tensor
    logit_rows: Tensor
    logit_tiles: list[Tile] | None
    pages: int
    """Pages of the longest sequence."""
    engram: Mapping[int, Tensor]

    def step(self, tensors: BatchTensors) -> Step:
        tables = tensors.block_table[tensors.slots, : self.pages].long()
        kept = self.decoder.count
        return Step(
            token_ids=tensors.token_ids,
            slots=tensors.slots,
            block_tables=tables,
            encoder=self.encoder.rows(),
            decoder=self.decoder.rows() if kept else None,
            decoder_rows=None if kept == self.encoder.count else self.decoder_rows.long(),
            entries={inputs.ratio: inputs.entries(tables) for inputs in self.entries},
            logit_rows=self.logit_rows.long(),
            logit_tiles=self.logit_tiles,
            engram=self.engram,
        )


class StepBuilder:
    def __init__(self, config: ModelConfig, layout: RowLayout, *, batch_invariant: bool) -> None:
        self._window = config.sliding_window
        self._layout = layout
        self._batch_invariant = batch_invariant
        self._tail_rings = {
            config.compress_ratios[source]: layout.tail_rings.get(source, 0)
            for source in config.kv_source_layer_ids
        }

    def prepare(
        self,
        segments: Sequence[Segment],
        logit_rows: Sequence[LogitRow],
        engram: Mapping[int, Tensor],
        upload: StepUpload,
        *,
        window_from: Sequence[int] | None = None,
        store_from: Sequence[int] | None = None,
    ) -> StepInputs:
        """Do the host's part of the step that computes `segments`.

        Args:
            segments: one per sequence.
            logit_rows: the decoder must keep these rows.
            engram: see `Step.engram`.
            upload: receives what the device must know.
            window_from: by segment, the first position that the encoder's windows look at. It is 0 unless
                their state was lost. None: 0 for all.
            store_from: by segment, the position before which global KV is in the pages already and is not
                written. None: 0 for all.
        """
        nothing = [0] * len(segments)
        encoder = _spans(segments, [s.start for s in segments], window_from or nothing)
        starts = [min(s.end, max(s.start, s.replay_from)) for s in segments]
        decoder = _spans(segments, starts, [s.replay_from for s in segments])
        rows_with_logits = [
            decoder[i].first_row + position - decoder[i].start for i, position in logit_rows
        ]
        invariant = self._batch_invariant
        return StepInputs(
            encoder=RowInputs.put(
                encoder, self._window, self._layout.encoder_ring, upload, batch_invariant=invariant
            ),
            decoder=RowInputs.put(
                decoder, self._window, self._layout.decoder_ring, upload, batch_invariant=invariant
            ),
            entries=tuple(
                EntryInputs.put(
                    encoder,
                    ratio,
                    tail_ring,
                    store_from or nothing,
                    upload,
                    batch_invariant=invariant,
                )
                for ratio, tail_ring in sorted(self._tail_rings.items())
            ),
            decoder_rows=upload.put(_kept_rows(encoder, decoder)),
            logit_rows=upload.put(np.array(rows_with_logits, np.int32)),
            logit_tiles=position_tiles([(p, 1) for _, p in logit_rows]) if invariant else None,
            pages=max(s.end - 1 for s in segments) // PAGE_TOKENS + 1,
            engram=engram,
        )


def _spans(
    segments: Sequence[Segment], starts: Sequence[int], window_from: Sequence[int]
) -> tuple[Span, ...]:
    spans, row = [], 0
    for segment, start, first in zip(segments, starts, window_from, strict=True):
        spans.append(Span(segment.slot, row, start, segment.end - start, first))
        row += segment.end - start
    return tuple(spans)


def _kept_rows(encoder: tuple[Span, ...], decoder: tuple[Span, ...]) -> IntArray:
    first = [e.first_row + d.start - e.start for e, d in zip(encoder, decoder, strict=True)]
    return ragged_arange(np.array(first, np.int32), np.array([d.rows for d in decoder], np.int32))
