"""`--deterministic` for Hugging Face models on a CPU: linear layers and attention on tiles of rows.

See `workers/attention/row_tiles.py` for why that makes results independent of the batch. What is not a linear
layer or attention (norms, activations, rotary embeddings) treats every element or row by itself, which
on one CPU thread gives equal bits too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.attention.math import attend
from workers.attention.row_tiles import TILE_ROWS, Tile, map_rows, position_tiles
from workers.contract import PAGE_TOKENS, ModelLoadError

if TYPE_CHECKING:
    from workers.attention.math import AttentionOptions
    from workers.attention.paged import SegmentedStep

EXPERT_DIMENSIONS = 3


class TiledLayers:
    """The linear layers of a model, made to work on the tiles of the step that is under way."""

    def __init__(self, model: nn.Module, head: nn.Module) -> None:
        """Replace the `forward` of every linear layer of `model`, and of its output layer `head`.

        Raises:
            ModelLoadError: the model has matrices that are no linear layers, such as experts.
        """
        self._tiles: list[Tile] = []
        self._head_tiles: list[Tile] = []
        for name, parameter in model.named_parameters():
            if parameter.dim() >= EXPERT_DIMENSIONS:
                raise ModelLoadError(
                    f"--deterministic does not cover the experts of {type(model).__name__} ({name}): "
                    "run it without."
                )
        for module in model.modules():
            if isinstance(module, nn.Linear):
                self._replace(module, is_head=module is head)

    def begin(self, runs: list[tuple[int, int]], sampled: list[int]) -> None:
        """A step starts: `runs` of (first position, rows), and the positions of its sampled rows."""
        self._tiles = position_tiles(runs)
        self._head_tiles = position_tiles([(position, 1) for position in sampled])

    def _replace(self, linear: nn.Linear, *, is_head: bool) -> None:
        def product(rows: Tensor) -> tuple[Tensor]:
            return (functional.linear(rows, linear.weight, linear.bias),)

        def forward(x: Tensor) -> Tensor:
            flat = x.reshape(-1, x.shape[-1])
            # A few models compute the logits of every row.
            only_sampled = is_head and len(flat) == len(self._head_tiles)
            tiles = self._head_tiles if only_sampled else self._tiles
            return map_rows(product, (flat,), tiles)[0].view(*x.shape[:-1], linear.out_features)

        linear.forward = forward  # type: ignore[method-assign,assignment]


@dataclass
class ExactStep:
    """An `AttentionStep` that attends tile by tile, over whole pages of keys."""

    step: SegmentedStep
    masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)
    """By first position of the tile and window."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        step = self.step
        step.pool.store(layer, step.write_pages, step.write_offsets, key, value)
        outputs = []
        for segment in step.segments:
            position = segment.start
            for tile in position_tiles([(segment.start, segment.tokens)]):
                first_row = segment.first_row + tile.first
                rows = query[first_row : first_row + tile.count]
                table = segment.block_table
                outputs.append(self._attend_tile(layer, rows, position, table, options))
                position += tile.count
        return torch.cat(outputs)

    def _attend_tile(
        self, layer: int, rows: Tensor, position: int, table: Tensor, options: AttentionOptions
    ) -> Tensor:
        """`rows` [n,H,D] from `position` on, all in one tile."""
        offset = position % TILE_ROWS
        start = position - offset
        tile = rows.new_zeros(TILE_ROWS, *rows.shape[1:])
        tile[offset : offset + len(rows)] = rows
        first_page, last_page = _page_range(start, options.window)
        pages = table[first_page : last_page + 1].clamp(min=0)
        pool = self.step.pool
        keys = pool.keys[layer].index_select(0, pages).flatten(0, 1).to(rows.dtype)
        values = pool.values[layer].index_select(0, pages).flatten(0, 1).to(rows.dtype)
        allowed = self._allowed(start, options.window)
        out = attend(tile[None], keys[None], values[None], allowed, causal=False, options=options)[
            0
        ]
        return out[offset : offset + len(rows)]

    def _allowed(self, start: int, window: int | None) -> Tensor:
        """bool [1, TILE_ROWS, keys]."""
        if (start, window) not in self.masks:
            first_page, last_page = _page_range(start, window)
            queries = torch.arange(start, start + TILE_ROWS)[:, None]
            keys = torch.arange(first_page * PAGE_TOKENS, (last_page + 1) * PAGE_TOKENS)[None]
            mask = keys <= queries
            if window is not None:
                mask &= keys > queries - window
            self.masks[start, window] = mask[None]
        return self.masks[start, window]


def _page_range(start: int, window: int | None) -> tuple[int, int]:
    """First and last page that a tile from position `start` on may look at."""
    oldest = 0 if window is None else max(0, start - window + 1)
    return oldest // PAGE_TOKENS, (start + TILE_ROWS - 1) // PAGE_TOKENS
