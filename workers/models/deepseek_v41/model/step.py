"""From sequences and positions to the tensors of one forward pass, in one upload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from workers.attention.row_tiles import Tile, position_tiles
from workers.contract import PAGE_TOKENS
from workers.engine.device import upload_int32
from workers.models.deepseek_v41.attention.entries import build_entries, entry_arrays, entry_runs
from workers.models.deepseek_v41.attention.rows import (
    IntArray,
    Rows,
    Span,
    build_rows,
    ragged_arange,
    row_arrays,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from workers.models.deepseek_v41.attention.entries import Entries
    from workers.models.deepseek_v41.cache.row_layout import ServingLayout
    from workers.models.deepseek_v41.config.model_config import ModelConfig


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one sequence, at positions start .. start+count-1."""

    slot: int
    start: int
    count: int
    replay_from: int = 0
    """First position that the decoder layers run on, and that their windows look at."""
    window_from: int = 0
    """First position that the encoder's windows look at: 0 unless their state was lost."""
    store_from: int = 0
    """Global KV of tokens before this position is in the pages already and is not written."""

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.count


@dataclass(frozen=True)
class Step:
    """All that the model needs to know of one step. T rows of B sequences, R rows with logits."""

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
    entries: Mapping[int, Entries]
    """By ratio."""
    logit_rows: Tensor
    """int64 [R]: rows of the decoder."""
    logit_tiles: list[Tile] | None
    """None outside the exact mode."""
    engram: Mapping[int, Tensor]
    """By layer: the table rows of each token, [T, rows * head_dim]."""

    def embeddings(self, layer: int, rows: Rows) -> Tensor | None:
        """Engram embeddings of `rows`; None where the layer has no Engram."""
        found = self.engram.get(layer)
        if found is None or rows is self.encoder or self.decoder_rows is None:
            return found
        return found[self.decoder_rows]


class StepBuilder:
    """Builds steps for one model and one cache layout."""

    def __init__(self, config: ModelConfig, layout: ServingLayout, *, exact: bool) -> None:
        self._window = config.sliding_window
        self._layout = layout
        self._exact = exact
        self._tail_rings = {
            config.compress_ratios[source]: layout.tail_rings.get(source, 0)
            for source in config.kv_source_layer_ids
        }

    def build(
        self,
        segments: Sequence[Segment],
        token_ids: Tensor,
        block_table: Tensor,
        logits_of: Sequence[tuple[int, int]],
        engram: Mapping[int, Tensor],
    ) -> Step:
        """The step that computes `segments`.

        Args:
            segments: one a sequence.
            token_ids: int64 [T] on the device.
            block_table: int32 [slots, pages], of all slots, up to date.
            logits_of: (index of the segment, position) of the rows whose logits are wanted; the
                decoder must keep them.
            engram: see `Step.engram`.
        """
        encoder = _spans(segments, [s.start for s in segments], [s.window_from for s in segments])
        starts = [min(s.end, max(s.start, s.replay_from)) for s in segments]
        decoder = _spans(segments, starts, [s.replay_from for s in segments])
        kept = sum(span.rows for span in decoder)
        logit_rows = np.array(
            [decoder[i].first_row + p - decoder[i].start for i, p in logits_of], np.int32
        )
        ratios = sorted(self._tail_rings)
        runs = {r: entry_runs(encoder, r, [s.store_from for s in segments]) for r in ratios}
        arrays = [
            np.array([s.slot for s in segments], np.int32),
            logit_rows,
            _kept_rows(encoder, decoder),
            *row_arrays(encoder, self._layout.encoder_ring),
            *row_arrays(decoder, self._layout.decoder_ring),
        ]
        for ratio in ratios:
            arrays += entry_arrays(encoder, ratio, self._tail_rings[ratio], runs[ratio])
        sent = iter([t.long() for t in upload_int32(arrays, token_ids.device)])
        slots, rows_with_logits, decoder_rows = next(sent), next(sent), next(sent)
        pages = max(s.end - 1 for s in segments) // PAGE_TOKENS + 1
        tables = block_table[slots, :pages].long()
        encoder_rows = build_rows(
            encoder, sent, self._window, self._layout.encoder_ring, exact=self._exact
        )
        kept_rows = build_rows(
            decoder, sent, self._window, self._layout.decoder_ring, exact=self._exact
        )
        return Step(
            token_ids=token_ids,
            slots=slots,
            block_tables=tables,
            encoder=encoder_rows,
            decoder=kept_rows if kept else None,
            decoder_rows=None if kept == len(token_ids) else decoder_rows,
            entries={
                ratio: build_entries(ratio, sent, tables, runs[ratio], exact=self._exact)
                for ratio in ratios
            },
            logit_rows=rows_with_logits,
            logit_tiles=position_tiles([(p, 1) for _, p in logits_of]) if self._exact else None,
            engram=engram,
        )


def _spans(
    segments: Sequence[Segment], starts: Sequence[int], window_from: Sequence[int]
) -> tuple[Span, ...]:
    """The rows from `starts` on, counted through."""
    spans, row = [], 0
    for segment, start, first in zip(segments, starts, window_from, strict=True):
        spans.append(Span(segment.slot, row, start, segment.end - start, first))
        row += segment.end - start
    return tuple(spans)


def _kept_rows(encoder: tuple[Span, ...], decoder: tuple[Span, ...]) -> IntArray:
    """Rows of `encoder` that are in `decoder` too."""
    first = [e.first_row + d.start - e.start for e, d in zip(encoder, decoder, strict=True)]
    return ragged_arange(np.array(first, np.int32), np.array([d.rows for d in decoder], np.int32))
