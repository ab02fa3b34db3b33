"""Prompt attention over pages: the rows of several sequences at once, each over its history and itself.

The KV of all rows is in the pages already. A program computes a tile of rows of one sequence and one query
head. The host lists the tiles.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from workers.attention.batch import IntArray, Segment
from workers.attention.math import AttentionOptions
from workers.attention.triton.softmax import base_2_factor, finish, scored
from workers.contract import PAGE_TOKENS

TILE_ROWS: Final = 128
TILE_WORDS: Final = 4
NO_WINDOW: Final = 1 << 30
_BULK_COPY_ALIGNMENT: Final = 16
"""Bytes to which the engine wants addresses and strides aligned."""


class TileShape(NamedTuple):
    rows: int
    """Of a program; divides `TILE_ROWS`."""
    keys: int
    """That a program reads at a time; divides `PAGE_TOKENS`."""
    num_warps: int
    num_stages: int


def choose_tile_shape(query: Tensor, keys: Tensor, values: Tensor) -> TileShape:
    dim = max(keys.shape[3], values.shape[3])
    much = _has_much_shared_memory(query.device)
    if query.dtype == torch.float32 or keys.dtype != query.dtype:
        return TileShape(32, 32, 4, 2) if much or dim <= 128 else TileShape(32, 16, 8, 2)
    if not much:
        return TileShape(64, 32, 4, 2)
    return TileShape(64, 64, 4, 3) if dim <= 128 else TileShape(128, 64, 8, 2)


def _has_much_shared_memory(device: torch.device) -> bool:
    """Whether it is one of the large GPUs, with 160 KiB or more a multiprocessor, and not 100."""
    if device.type != "cuda":
        return True
    major, minor = torch.cuda.get_device_capability(device)
    return (major, minor) == (8, 0) or major in (9, 10)


def list_tiles(segments: Iterable[Segment]) -> IntArray:
    """[tiles * 4]: slot, first row, position of the first row, number of rows.

    Tiles with the most keys come first, so that no long one starts last.
    """
    tiles = []
    for segment in segments:
        at = np.arange(0, segment.rows, TILE_ROWS, dtype=np.int32)
        tile = np.empty((len(at), TILE_WORDS), np.int32)
        tile[:, 0] = segment.slot
        tile[:, 1] = segment.first_row + at
        tile[:, 2] = segment.start + at
        tile[:, 3] = np.minimum(segment.rows - at, TILE_ROWS)
        tiles.append(tile)
    every = np.concatenate(tiles)
    ends = every[:, 2] + every[:, 3]
    return every[np.argsort(-ends, kind="stable")].reshape(-1)


def paged_prefill(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    tiles: Tensor,
    options: AttentionOptions,
    *,
    shape: TileShape | None = None,
    bulk_copies: bool = True,
) -> Tensor:
    """Causal attention of rows over the keys of their sequences. Only enqueues work.

    Args:
        query: [T,H,D]; the KV of all rows is in the pages already.
        keys: [num_pages, page_tokens, Hk, D], one layer's view into the pool; any dtype.
        values: [num_pages, page_tokens, Hk, Dv].
        block_table: int32 [slots, max_pages].
        tiles: int32, from `list_tiles`; rows in no tile get no output.
        shape: None: the one that is best for these types and dimensions.
        bulk_copies: read pages by the GPU's copy engine where the layout allows it.

    Returns:
        [T,H,Dv].
    """
    rows, heads, dim = query.shape
    assert query.stride(2) == 1
    shape = shape or choose_tile_shape(query, keys, values)
    kv_heads, value_dim = values.shape[2:]
    out = torch.empty(rows, heads, value_dim, dtype=query.dtype, device=query.device)
    dim_block = max(16, triton.next_power_of_2(dim))
    value_block = max(16, triton.next_power_of_2(value_dim))
    bulk = bulk_copies and keys.dtype == query.dtype and query.element_size() == 2
    bulk = bulk and can_copy_in_bulk(keys, values)
    _prefill_kernel[(heads, len(tiles) // TILE_WORDS, TILE_ROWS // shape.rows)](
        query,
        _describe(keys, shape.keys, dim_block) if bulk else keys,
        _describe(values, shape.keys, value_block) if bulk else values,
        options.sinks,
        out,
        tiles,
        block_table,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        values.stride(0),
        block_table.stride(0),
        options.scaling,
        options.softcap,
        NO_WINDOW if options.window is None else options.window,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=dim,
        DV=value_dim,
        PAGE=PAGE_TOKENS,
        WORDS=TILE_WORDS,
        HAS_WINDOW=options.window is not None,
        BULK=bulk,
        ROWS=shape.rows,
        KEYS=shape.keys,
        BLOCK_D=dim_block,
        BLOCK_DV=value_block,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    return out


def can_copy_in_bulk(keys: Tensor, values: Tensor) -> bool:
    """Whether the GPU has an engine that copies tiles to shared memory, and it can read these pages."""
    if keys.is_cuda and torch.cuda.get_device_capability(keys.device)[0] < 9:
        return False
    return all(
        pages.data_ptr() % _BULK_COPY_ALIGNMENT == 0
        and all(
            pages.stride(i) * pages.element_size() % _BULK_COPY_ALIGNMENT == 0 for i in range(3)
        )
        for pages in (keys, values)
    )


def _describe(pages: Tensor, key_block: int, dim_block: int) -> TensorDescriptor:
    """Of [page, head, token, dim], to load [1, 1, key_block, dim_block] padded with zeros."""
    by_head = pages.transpose(1, 2)
    return TensorDescriptor(
        pages, list(by_head.shape), list(by_head.stride()), [1, 1, key_block, dim_block]
    )


@triton.jit(do_not_specialize=["window"])
def _prefill_kernel(
    query,
    keys,
    values,
    sinks,
    out,
    tiles,
    block_table,
    query_row,
    query_head,
    key_page,
    value_page,
    table_row,
    scaling,
    softcap,
    window,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PAGE: tl.constexpr,
    WORDS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BULK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    head = tl.program_id(0)
    tile = tiles + tl.program_id(1) * WORDS
    slot = tl.load(tile)
    skipped = tl.program_id(2) * ROWS
    first_row = tl.load(tile + 1) + skipped
    start = tl.load(tile + 2) + skipped
    rows = tl.minimum(tl.load(tile + 3) - skipped, ROWS)
    if rows <= 0:
        return
    r = tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_DV)
    row = (first_row + r).to(tl.int64)
    q = tl.load(
        query + row[:, None] * query_row + head * query_head + d[None, :],
        mask=(r < rows)[:, None] & (d < D)[None, :],
        other=0.0,
    )
    table = block_table + slot.to(tl.int64) * table_row
    kv_head = head // (HEADS // KV_HEADS)
    end = start + rows
    # All rows see the keys of blocks that lie between `full` and `diagonal`.
    first = 0
    full = 0
    if HAS_WINDOW:
        first = tl.maximum(start + 1 - window, 0) // KEYS * KEYS
        full = tl.minimum(tl.cdiv(tl.maximum(end - window, 0), KEYS) * KEYS, end)
    diagonal = tl.maximum((start + 1) // KEYS * KEYS, full)

    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    if HAS_WINDOW:
        m, total, acc = _attend_blocks(
            q, keys, values, table, m, total, acc, first, full, end, start, kv_head, key_page,
            value_page, scaling, softcap, window, True,
            KV_HEADS, D, DV, PAGE, HAS_WINDOW, BULK, ROWS, KEYS, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
    m, total, acc = _attend_blocks(
        q, keys, values, table, m, total, acc, full, diagonal, end, start, kv_head, key_page,
        value_page, scaling, softcap, window, False,
        KV_HEADS, D, DV, PAGE, HAS_WINDOW, BULK, ROWS, KEYS, BLOCK_D, BLOCK_DV,
    )  # fmt: skip
    m, total, acc = _attend_blocks(
        q, keys, values, table, m, total, acc, diagonal, end, end, start, kv_head, key_page,
        value_page, scaling, softcap, window, True,
        KV_HEADS, D, DV, PAGE, HAS_WINDOW, BULK, ROWS, KEYS, BLOCK_D, BLOCK_DV,
    )  # fmt: skip
    result = finish(acc, m, total, sinks, head + tl.zeros([ROWS], tl.int32), r < ROWS)
    tl.store(
        out + (row * HEADS + head)[:, None] * DV + e[None, :],
        result.to(out.dtype.element_ty),
        mask=(r < rows)[:, None] & (e < DV)[None, :],
    )


@triton.jit
def _attend_blocks(
    q,
    keys,
    values,
    table,
    m,
    total,
    acc,
    begin,
    stop,
    end,
    start,
    kv_head,
    key_page,
    value_page,
    scaling,
    softcap,
    window,
    MASKED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BULK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """One online softmax over the blocks from `begin` to `stop`; the sequence has `end` keys by now."""
    n = tl.arange(0, KEYS)
    position = start + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_DV)
    begin = tl.multiple_of(begin, KEYS)
    factor = base_2_factor(scaling, softcap)
    # Each page number is loaded one block ahead, so that no copy of keys waits for it.
    next_page = tl.load(table + begin // PAGE, mask=begin < stop, other=0)
    for at in tl.range(begin, stop, KEYS):
        page = next_page
        next_page = tl.load(table + tl.minimum(at + KEYS, end - 1) // PAGE)
        if BULK:
            k = keys.load([page, kv_head, at % PAGE, 0]).reshape(KEYS, BLOCK_D)
        else:
            offset = tl.minimum(at + n, end - 1) % PAGE
            k = tl.load(
                keys
                + page.to(tl.int64) * key_page
                + (offset * (KV_HEADS * D) + kv_head * D)[:, None]
                + d[None, :],
                mask=(d < D)[None, :],
                other=0.0,
            )
        scores = tl.dot(q, k.to(q.dtype).T, input_precision="ieee")
        scores = scored(scores, scaling, softcap)
        if MASKED:
            seen = (at + n)[None, :] <= position[:, None]
            if HAS_WINDOW:
                seen = seen & ((at + n)[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1) * factor)
        # A row that has seen no key yet keeps its sums at zero.
        base = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
        weights = tl.exp2(scores * factor - base[:, None])
        shrink = tl.exp2(m - base)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        if BULK:
            v = values.load([page, kv_head, at % PAGE, 0]).reshape(KEYS, BLOCK_DV)
            if MASKED:
                # Keys beyond the end may never have been written, or not with finite numbers.
                v = tl.where((at + n < end)[:, None], v, 0.0)
        else:
            v = tl.load(
                values
                + page.to(tl.int64) * value_page
                + (offset * (KV_HEADS * DV) + kv_head * DV)[:, None]
                + e[None, :],
                mask=(e < DV)[None, :],
                other=0.0,
            )
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
        m = m_new
    return m, total, acc
