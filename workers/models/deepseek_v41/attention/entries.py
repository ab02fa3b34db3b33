"""Which entries of the global KV a step completes, and where their tokens and their places are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from workers.attention.row_tiles import Tile, position_tiles
from workers.contract import PAGE_TOKENS
from workers.models.deepseek_v41.attention.rows import IntArray, Span, ragged_arange
from workers.models.deepseek_v41.cache.row_layout import entries_per_page

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor


@dataclass(frozen=True)
class Entries:
    """Entries of one ratio that a step completes. G entries of `ratio` tokens, tail ring of R."""

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
    """None outside the exact mode."""


def entry_runs(spans: Sequence[Span], ratio: int, store_from: Sequence[int]) -> IntArray:
    """[B,2]: first entry and number of entries that each sequence completes in this step.

    An entry is complete with its last token. Entries of tokens before `store_from` are in the pages
    already and not made again.
    """
    first = [
        max(s.start // ratio, -(-low // ratio)) for s, low in zip(spans, store_from, strict=True)
    ]
    return np.array(
        [(f, max(0, s.end // ratio - f)) for f, s in zip(first, spans, strict=True)], np.int32
    ).reshape(-1, 2)


def entry_arrays(
    spans: Sequence[Span], ratio: int, tail_ring: int, runs: IntArray
) -> list[IntArray]:
    """The host side of `Entries`, in the order in which `build_entries` takes it."""
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
    return [
        entry,
        sequence,
        members.astype(np.int32).ravel(),
        tail_rows,
        np.repeat(slot, kept),
        tail_positions % max(1, tail_ring),
    ]


def build_entries(
    ratio: int, uploaded: Iterator[Tensor], block_tables: Tensor, runs: IntArray, *, exact: bool
) -> Entries:
    """Make the device side from the uploaded `entry_arrays`.

    Args:
        ratio: tokens to an entry.
        uploaded: int64 tensors.
        block_tables: int64 [B,P].
        runs: see `entry_runs`.
        exact: whether to cut tiles, by entry number.
    """
    entry, sequence, members, tail_rows, tail_slot, tail_place = (next(uploaded) for _ in range(6))
    positions = entry * ratio
    return Entries(
        ratio=ratio,
        positions=positions,
        members=members.view(-1, ratio),
        page=block_tables[sequence, positions // PAGE_TOKENS],
        place=entry % entries_per_page(ratio),
        tail_rows=tail_rows,
        tail_slot=tail_slot,
        tail_place=tail_place,
        tiles=position_tiles([(int(f), int(n)) for f, n in runs]) if exact else None,
    )
