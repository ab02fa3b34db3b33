"""Batch-invariant attention: tiles of rows placed by position, over whole pages of keys.

`workers/attention/row_tiles.py` says why its bits do not depend on what else is in the step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.attention.batch import Batch, BatchTensors, StepUpload
from workers.attention.math import AttentionOptions, attend
from workers.attention.page_pool import PagePool, written_places
from workers.attention.row_tiles import TILE_ROWS, position_tiles
from workers.contract import PAGE_TOKENS


class BatchInvariantAttention:
    """Implements `AttentionBackend` on a CPU, tile by tile."""

    captures_decodes = False

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._batch: Batch | None = None
        self._tensors: BatchTensors | None = None
        self._places: tuple[Tensor, Tensor] | None = None
        self._masks: dict[tuple[int, int | None], Tensor] = {}
        """By first position of the tile and window."""

    def prepare(self, batch: Batch, upload: StepUpload) -> None:
        self._batch = batch
        self._masks.clear()

    def begin(self, tensors: BatchTensors) -> None:
        self._tensors = tensors
        self._places = written_places(tensors)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        assert self._batch is not None and self._tensors is not None and self._places is not None
        self._pool.store(layer, *self._places, key, value)
        outputs = []
        for segment in self._batch.segments:
            table = self._tensors.block_table[segment.slot]
            position = segment.start
            for tile in position_tiles([(segment.start, segment.rows)]):
                first_row = segment.first_row + tile.first
                rows = query[first_row : first_row + tile.count]
                outputs.append(self._attend_tile(layer, rows, position, table, options))
                position += tile.count
        return torch.cat(outputs)

    def _attend_tile(
        self, layer: int, rows: Tensor, position: int, table: Tensor, options: AttentionOptions
    ) -> Tensor:
        """`rows` [n,H,D] start at `position` and all lie in one tile."""
        offset = position % TILE_ROWS
        start = position - offset
        tile = rows.new_zeros(TILE_ROWS, *rows.shape[1:])
        tile[offset : offset + len(rows)] = rows
        first_page, last_page = _page_range(start, options.window)
        pages = table[first_page : last_page + 1].clamp(min=0)
        keys = self._pool.keys[layer].index_select(0, pages).flatten(0, 1).to(rows.dtype)
        values = self._pool.values[layer].index_select(0, pages).flatten(0, 1).to(rows.dtype)
        allowed = self._allowed(start, options.window)
        out = attend(tile[None], keys[None], values[None], allowed, causal=False, options=options)
        return out[0][offset : offset + len(rows)]

    def _allowed(self, start: int, window: int | None) -> Tensor:
        """bool [1, TILE_ROWS, keys]."""
        if (start, window) not in self._masks:
            first_page, last_page = _page_range(start, window)
            queries = torch.arange(start, start + TILE_ROWS)[:, None]
            keys = torch.arange(first_page * PAGE_TOKENS, (last_page + 1) * PAGE_TOKENS)[None]
            mask = keys <= queries
            if window is not None:
                mask &= keys > queries - window
            self._masks[start, window] = mask[None]
        return self._masks[start, window]


def _page_range(start: int, window: int | None) -> tuple[int, int]:
    oldest = 0 if window is None else max(0, start - window + 1)
    return oldest // PAGE_TOKENS, (start + TILE_ROWS - 1) // PAGE_TOKENS
