"""Batch invariance: arithmetic on tiles of a fixed number of rows, placed by position.

The result of a matrix product for one row can depend, in its last bits, on how many rows there are and
which one it is. Here a row always meets the same shapes: its place in its tile follows from its
position, and a tile always has the same number of rows. So equal positions of equal sequences give
equal bits, whatever else is in the step and however the prompt was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

RowFunction = Callable[..., tuple[Tensor, ...]]
"""Maps tensors of n rows each to tensors of n rows each, and treats each row independently."""

TILE_ROWS: Final = 32
"""Rows per tile."""


@dataclass(frozen=True)
class Tile:
    """Rows first .. first+count-1, which go at `offset` in a fixed tile."""

    first: int
    count: int
    offset: int


def position_tiles(runs: Sequence[tuple[int, int]]) -> list[Tile]:
    """Cut runs of (first position, count) into tiles. A row's place is its position modulo the tile size.

    Equal positions of equal sequences then go through the same arithmetic, whatever else runs.
    """
    tiles, row = [], 0
    for start, count in runs:
        position, end = start, start + count
        while position < end:
            offset = position % TILE_ROWS
            taken = min(TILE_ROWS - offset, end - position)
            tiles.append(Tile(row, taken, offset))
            position += taken
            row += taken
    return tiles


def map_rows(
    function: RowFunction,
    inputs: tuple[Tensor, ...],
    tiles: list[Tile] | None,
    limit: int | None = None,
) -> tuple[Tensor, ...]:
    """Apply a function that treats each row independently.

    Args:
        function: maps tensors of n rows each to tensors of n rows each.
        inputs: tensors with equal numbers of rows.
        tiles: None: call it on all rows at once. Otherwise batch-invariant: one call per tile, always on
            `TILE_ROWS` rows, with zeros for the absent ones.
        limit: the most rows per call, to bound its memory.
    """
    if tiles is not None:
        return _map_tiles(function, inputs, tiles)
    if limit is None or len(inputs[0]) <= limit:
        return function(*inputs)
    parts = [function(*part) for part in zip(*(torch.split(x, limit) for x in inputs), strict=True)]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def _map_tiles(
    function: RowFunction,
    inputs: tuple[Tensor, ...],
    tiles: list[Tile],
) -> tuple[Tensor, ...]:
    results: list[tuple[Tensor, ...]] = []
    for tile in tiles:
        padded = [x.new_zeros(TILE_ROWS, *x.shape[1:]) for x in inputs]
        inside = slice(tile.offset, tile.offset + tile.count)
        for buffer, x in zip(padded, inputs, strict=True):
            buffer[inside] = x[tile.first : tile.first + tile.count]
        results.append(tuple(y[inside] for y in function(*padded)))
    if not results:  # no rows: let the function say what its results look like
        return tuple(
            y[:0] for y in function(*(x.new_zeros(TILE_ROWS, *x.shape[1:]) for x in inputs))
        )
    return tuple(torch.cat(column) for column in zip(*results, strict=True))
