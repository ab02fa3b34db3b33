"""Prompt attention for Hopper GPUs: what `paged_prefill` does, for its most frequent case, some 20 % faster.

While the tensor cores add the weighted values of one block, the softmax of the next is computed. Triton cannot
be told so; Gluon, its lower level, can.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from workers.attention.math import AttentionOptions
from workers.contract import PAGE_TOKENS

_ROWS: Final = 128
_TILE_WORDS: Final = 4
_NO_WINDOW: Final = 1 << 30
_TYPES: Final = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def is_covered(query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> bool:
    """Whether `hopper_prefill` can be used on a Hopper GPU."""
    return (
        options.plain
        and query.dtype in _TYPES
        and keys.dtype == query.dtype
        and keys.shape[3] == values.shape[3]
        and keys.shape[3] in (64, 128)
        and keys.data_ptr() % 16 == values.data_ptr() % 16 == 0
    )


def hopper_prefill(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    tiles: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """`paged_prefill`, where `is_covered`."""
    rows, heads, dim = query.shape
    assert query.stride(2) == 1
    kv_heads = keys.shape[2]
    out = torch.empty(rows, heads, dim, dtype=query.dtype, device=query.device)
    _hopper_prefill_kernel[(heads, len(tiles) // _TILE_WORDS)](
        query,
        _describe(keys),
        _describe(values),
        out,
        tiles,
        block_table,
        query.stride(0),
        query.stride(1),
        block_table.stride(0),
        options.scaling * 1.4426950408889634,
        _NO_WINDOW if options.window is None else options.window,
        HEADS=heads,
        GROUP=heads // kv_heads,
        D=dim,
        WORDS=_TILE_WORDS,
        HAS_WINDOW=options.window is not None,
        ROWS=_ROWS,
        KEYS=PAGE_TOKENS,
        num_warps=8,
    )
    return out


def _describe(pages: Tensor) -> TensorDescriptor:
    """Of [page, head, token, dim], to load all tokens of one head."""
    by_head = pages.transpose(1, 2)
    block = [1, 1, PAGE_TOKENS, pages.shape[3]]
    layout = gl.NVMMASharedLayout.get_default_for(block, _TYPES[pages.dtype])
    return TensorDescriptor(pages, list(by_head.shape), list(by_head.stride()), block, layout)


@gluon.jit
def _fetch(desc, page, kv_head, barriers, buffers, block, wanted):
    """Start to copy a page's keys or values to the buffer of `block`."""
    barrier = barriers.index(block % 2)
    mbarrier.expect(barrier, desc.block_type.nbytes, pred=wanted)
    tma.async_copy_global_to_shared(
        desc, [page, kv_head, 0, 0], barrier, buffers.index(block % 2), pred=wanted
    )


@gluon.jit
def _arrived(desc, barriers, buffers, block, KEYS: gl.constexpr, D: gl.constexpr):
    """Wait for a block; return it as [keys, D] in shared memory."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, D], desc.dtype)
    mbarrier.wait(barriers.index(block % 2), (block // 2) & 1)
    return buffers.index(block % 2)._reinterpret(desc.dtype, [KEYS, D], layout)


@gluon.jit(do_not_specialize=["window"])
def _hopper_prefill_kernel(
    query,
    keys,
    values,
    out,
    tiles,
    block_table,
    query_row,
    query_head,
    table_row,
    factor,
    window,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    WORDS: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
):
    dtype: gl.constexpr = keys.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, KEYS, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    scores_rows: gl.constexpr = gl.SliceLayout(1, scores_layout)
    acc_rows: gl.constexpr = gl.SliceLayout(1, acc_layout)
    plain: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])

    head = gl.program_id(0)
    tile = tiles + gl.program_id(1) * WORDS
    slot = gl.load(tile)
    first_row = gl.load(tile + 1)
    start = gl.load(tile + 2)
    rows = gl.load(tile + 3)
    kv_head = head // GROUP
    end = start + rows
    first_block = 0
    full = 0
    if HAS_WINDOW:
        first_block = gl.maximum(start + 1 - window, 0) // KEYS
        full = gl.maximum(end - window, 0)  # from here on no row's window hides a key
    blocks = gl.cdiv(end, KEYS) - first_block
    table = block_table + slot.to(gl.int64) * table_row + first_block

    key_buffers = gl.allocate_shared_memory(dtype, [2, 1, 1, KEYS, D], keys.layout)
    value_buffers = gl.allocate_shared_memory(dtype, [2, 1, 1, KEYS, D], values.layout)
    key_barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    value_barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(key_barriers.index(i), count=1)
        mbarrier.init(value_barriers.index(i), count=1)
    page = gl.load(table)
    next_page = gl.load(table + 1, mask=blocks > 1, other=0)
    _fetch(keys, page, kv_head, key_barriers, key_buffers, 0, True)
    _fetch(values, page, kv_head, value_barriers, value_buffers, 0, True)
    _fetch(keys, next_page, kv_head, key_barriers, key_buffers, 1, blocks > 1)
    _fetch(values, next_page, kv_head, value_barriers, value_buffers, 1, blocks > 1)
    next_page = gl.load(table + 2, mask=blocks > 2, other=0)

    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, plain))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, plain))
    row = (first_row + r).to(gl.int64)
    q = gl.load(
        query + row[:, None] * query_row + head * query_head + d[None, :],
        mask=(r < rows)[:, None],
        other=0.0,
    )
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    q_shared = gl.allocate_shared_memory(dtype, [ROWS, D], q_layout, q)
    fence_async_shared()

    position = start + gl.arange(0, ROWS, layout=scores_rows)
    n = gl.arange(0, KEYS, layout=gl.SliceLayout(0, scores_layout))
    no_scores = gl.zeros([ROWS, KEYS], gl.float32, scores_layout)
    m = gl.full([ROWS], float("-inf"), gl.float32, scores_rows)
    total = gl.zeros([ROWS], gl.float32, scores_rows)
    acc = gl.zeros([ROWS, D], gl.float32, acc_layout)

    k = _arrived(keys, key_barriers, key_buffers, 0, KEYS, D)
    scores = warpgroup_mma(q_shared, k.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    _fetch(keys, next_page, kv_head, key_barriers, key_buffers, 2, blocks > 2)
    m, total, shrink, weights = _softmax(
        scores, m, total, first_block * KEYS, full, position, n, start, factor, window,
        HAS_WINDOW, KEYS, dtype, weights_layout,
    )  # fmt: skip

    for block in range(1, blocks):
        value_page = next_page  # of block + 1
        next_page = gl.load(table + block + 2, mask=block + 2 < blocks, other=0)
        k = _arrived(keys, key_barriers, key_buffers, block, KEYS, D)
        scores = warpgroup_mma(q_shared, k.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        v = _arrived(values, value_barriers, value_buffers, block - 1, KEYS, D)
        acc = warpgroup_mma(weights, v, acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        _fetch(keys, next_page, kv_head, key_barriers, key_buffers, block + 2, block + 2 < blocks)
        m, total, shrink, next_weights = _softmax(
            scores, m, total, (first_block + block) * KEYS, full, position, n, start, factor, window,
            HAS_WINDOW, KEYS, dtype, weights_layout,
        )  # fmt: skip
        acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
        more = block + 1 < blocks
        _fetch(values, value_page, kv_head, value_barriers, value_buffers, block + 1, more)
        acc = acc * gl.convert_layout(shrink, acc_rows)[:, None]
        weights = next_weights

    last = blocks - 1
    v = _arrived(values, value_barriers, value_buffers, last, KEYS, D)
    if (first_block + blocks) * KEYS > end:
        # Keys beyond the end may never have been written, or not with finite numbers.
        token = gl.arange(0, KEYS, layout=gl.SliceLayout(1, plain)) + (first_block + last) * KEYS
        kept = gl.where((token < end)[:, None], v.load(plain), 0.0)
        v.store(kept.to(dtype))
        fence_async_shared()
    acc = warpgroup_mma(weights, v, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    total = gl.where(total == 0, 1.0, total)
    result = acc / gl.convert_layout(total, acc_rows)[:, None]
    for i in gl.static_range(2):
        mbarrier.invalidate(key_barriers.index(i))
        mbarrier.invalidate(value_barriers.index(i))
    result = gl.convert_layout(result.to(out.dtype.element_ty), plain)
    gl.store(
        out + (row * HEADS + head)[:, None] * D + d[None, :], result, mask=(r < rows)[:, None]
    )


@gluon.jit
def _softmax(
    scores,
    m,
    total,
    at,
    full,
    position,
    n,
    start,
    factor,
    window,
    HAS_WINDOW: gl.constexpr,
    KEYS: gl.constexpr,
    dtype: gl.constexpr,
    weights_layout: gl.constexpr,
):
    """One step of the online softmax, for the block of keys that starts at `at`."""
    masked = at + KEYS > start + 1
    if HAS_WINDOW:
        masked = masked | (at < full)
    if masked:
        seen = (at + n)[None, :] <= position[:, None]
        if HAS_WINDOW:
            seen = seen & ((at + n)[None, :] > position[:, None] - window)
        scores = gl.where(seen, scores, float("-inf"))
    m_new = gl.maximum(m, gl.max(scores, 1) * factor)
    base = m_new
    if HAS_WINDOW:
        # A row that has seen no key yet keeps its sums at zero.
        base = gl.where(m_new == float("-inf"), 0.0, m_new)
    weights = gl.exp2(scores * factor - base[:, None])
    shrink = gl.exp2(m - base)
    total = total * shrink + gl.sum(weights, 1)
    return m_new, total, shrink, gl.convert_layout(weights.to(dtype), weights_layout)
