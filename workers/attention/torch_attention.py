"""The reference backend: attention over pages in plain PyTorch, for every processor and dtype."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from workers.attention.backend import LayerAttention
from workers.attention.batch import Batch, BatchTensors, Segment, StepUpload
from workers.attention.math import AttentionOptions, attend
from workers.attention.page_pool import PagePool, written_places
from workers.contract import PAGE_TOKENS

_GATHER_TOKENS: Final = 1 << 18
"""Padded key positions that one batched decode gather may hold; larger batches go in groups."""


class TorchAttention:
    """Implements `AttentionBackend`.

    Prompt chunks, and decodes on a CPU, run sequence by sequence. Decodes on a GPU run in padded groups, so
    only the device needs to know their lengths.
    """

    captures_decodes = False

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._batch: Batch | None = None
        self._step: LayerAttention | None = None

    def prepare(self, batch: Batch, upload: StepUpload) -> None:
        self._batch, self._step = batch, None

    def begin(self, tensors: BatchTensors) -> None:
        batch = self._batch
        assert batch is not None, "a step begins that was not prepared"
        pages, offsets = written_places(tensors)
        if batch.plan.decodes and pages.device.type != "cpu":
            self._step = DecodeStep(
                pool=self._pool,
                block_tables=tensors.block_table[tensors.slots],
                positions=tensors.positions,
                width=max(segment.start for segment in batch.segments) // PAGE_TOKENS + 1,
                write_pages=pages,
                write_offsets=offsets,
            )
        else:
            self._step = SegmentedStep(
                self._pool, batch.segments, tensors.block_table, pages, offsets
            )

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        assert self._step is not None, "a layer attends outside of a step"
        return self._step.attend(layer, query, key, value, options)


@dataclass
class SegmentedStep:
    """A step whose lengths the host knows: prompt chunks, and decodes on a CPU."""

    pool: PagePool
    segments: tuple[Segment, ...]
    block_table: Tensor
    """int32 [slots, max_pages]."""
    write_pages: Tensor
    """int [T]: the page of each token's KV."""
    write_offsets: Tensor
    """int [T]: its place in the page."""
    masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)
    """By slot and window; made once per step."""

    def __post_init__(self) -> None:
        self._tables = {s.slot: self.block_table[s.slot] for s in self.segments}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        key, value = self.pool.store(layer, self.write_pages, self.write_offsets, key, value)
        outputs = [
            self._attend_segment(layer, segment, query, key, value, options)
            for segment in self.segments
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_segment(
        self,
        layer: int,
        segment: Segment,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        rows = slice(segment.first_row, segment.first_row + segment.rows)
        window = options.window
        inside = window is None or segment.rows <= window
        if segment.start == 0 and inside:
            own = (query[None, rows], key[None, rows], value[None, rows])
            return attend(*own, None, causal=True, options=options)[0]
        keys, values = self._gather(layer, segment, window, query.dtype)
        if segment.rows == 1:
            if window is not None:
                keys, values = keys[-window:], values[-window:]
            allowed = None
        else:
            allowed = self._allowed(segment, window)
        return attend(
            query[None, rows], keys[None], values[None], allowed, causal=False, options=options
        )[0]

    def _gather(
        self, layer: int, segment: Segment, window: int | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Keys and values as `dtype` from `_first_key` to the segment's end: [L,Hk,D], [L,Hk,Dv]."""
        first, end = _first_key(segment, window), segment.end
        pages = self._tables[segment.slot][first // PAGE_TOKENS : -(-end // PAGE_TOKENS)]
        keys = self.pool.keys[layer].index_select(0, pages).flatten(0, 1)
        values = self.pool.values[layer].index_select(0, pages).flatten(0, 1)
        count = end - first
        return keys[:count].to(dtype), values[:count].to(dtype)

    def _allowed(self, segment: Segment, window: int | None) -> Tensor:
        """bool [1, tokens, keys from `_first_key` on]."""
        key = (segment.slot, window)
        if key not in self.masks:
            device, end = self.block_table.device, segment.end
            queries = torch.arange(segment.start, end, device=device)[:, None]
            keys = torch.arange(_first_key(segment, window), end, device=device)[None]
            mask = keys <= queries
            if window is not None:
                mask &= keys > queries - window
            self.masks[key] = mask[None]
        return self.masks[key]


def _first_key(segment: Segment, window: int | None) -> int:
    """Position of the first key that the segment needs, rounded down to a page boundary."""
    oldest = 0 if window is None else max(0, segment.start - window + 1)
    return oldest - oldest % PAGE_TOKENS


@dataclass
class DecodeStep:
    """One token for each of B sequences. Only the device needs to know their lengths."""

    pool: PagePool
    block_tables: Tensor
    """int32 [B, max_pages]."""
    positions: Tensor
    """int64 [B]: position of each input token."""
    width: int
    """Pages that the longest of the sequences uses (host's bound)."""
    write_pages: Tensor
    write_offsets: Tensor
    gather_tokens: int = _GATHER_TOKENS
    gathers: dict[int | None, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        self.pool.store(layer, self.write_pages, self.write_offsets, key, value)
        pages, allowed = self._gather_plan(options.window)
        group = max(1, self.gather_tokens // allowed.shape[1])
        outputs = []
        for at in range(0, query.shape[0], group):
            rows = slice(at, at + group)
            keys = self.pool.keys[layer][pages[rows]].flatten(1, 2).to(query.dtype)
            values = self.pool.values[layer][pages[rows]].flatten(1, 2).to(query.dtype)
            outputs.append(
                attend(
                    query[rows, None],
                    keys,
                    values,
                    allowed[rows, None],
                    causal=False,
                    options=options,
                )[:, 0]
            )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _gather_plan(self, window: int | None) -> tuple[Tensor, Tensor]:
        """Pages to read, int32 [B,C], and which of their tokens count, bool [B, C*page_tokens]."""
        if window not in self.gathers:
            columns = self._columns(window)
            offsets = torch.arange(PAGE_TOKENS, device=columns.device)
            keys = (columns[:, :, None] * PAGE_TOKENS + offsets).flatten(1)
            queries = self.positions[:, None]
            allowed = (keys >= 0) & (keys <= queries)
            if window is not None:
                allowed &= keys > queries - window
            pages = self.block_tables.gather(1, columns.clamp(min=0))
            self.gathers[window] = (pages, allowed)
        return self.gathers[window]

    def _columns(self, window: int | None) -> Tensor:
        """Block-table columns to read, int64 [B,C]; negative ones are padding."""
        device = self.positions.device
        count = self.width
        if window is not None:
            count = min(count, (window + PAGE_TOKENS - 2) // PAGE_TOKENS + 1)
        if count == self.width:
            return torch.arange(count, device=device).expand(len(self.positions), count)
        last = self.positions[:, None] // PAGE_TOKENS
        return last - torch.arange(count - 1, -1, -1, device=device)
