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
_STAGES: Final = 2
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
        STAGES=_STAGES,
        num_warps=4,
    )
    return out


def _describe(pages: Tensor) -> TensorDescriptor:
    """Of [page, head, token, dim], to load all tokens of one head."""
    by_head = pages.transpose(1, 2)
    block = [1, 1, PAGE_TOKENS, pages.shape[3]]
    layout = gl.NVMMASharedLayout.get_default_for(block, _TYPES[pages.dtype])
    return TensorDescriptor(pages, list(by_head.shape), list(by_head.stride()), block, layout)


@gluon.jit
def _buffer(desc, buffers, block, KEYS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """The copy of a block, as [keys, D] in shared memory."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, D], desc.dtype)
    return buffers.index(block % STAGES)._reinterpret(desc.dtype, [KEYS, D], layout)


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
    STAGES: gl.constexpr,
):
    """Two groups of four warps attend half of the rows each; one more warp copies pages for both."""
    dtype: gl.constexpr = keys.dtype
    head = gl.program_id(0)
    tile = tiles + gl.program_id(1) * WORDS
    slot = gl.load(tile)
    first_row = gl.load(tile + 1)
    start = gl.load(tile + 2)
    rows = gl.load(tile + 3)
    end = start + rows
    first_block = gl.to_tensor(0)
    if HAS_WINDOW:
        first_block = gl.maximum(start + 1 - window, 0) // KEYS
    blocks = gl.cdiv(end, KEYS) - first_block
    table = block_table + slot.to(gl.int64) * table_row + first_block

    key_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, KEYS, D], keys.layout)
    value_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, KEYS, D], values.layout)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS // 2, D], dtype)
    q_buffers = gl.allocate_shared_memory(dtype, [2, ROWS // 2, D], q_layout)
    # Of each buffer: filled, and free again.
    keys_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    keys_read = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_read = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(keys_ready.index(i), count=1)
        mbarrier.init(values_ready.index(i), count=1)
        mbarrier.init(keys_read.index(i), count=2)
        mbarrier.init(values_read.index(i), count=2)
    shared = (
        query, keys, values, out, q_buffers, key_buffers, value_buffers, keys_ready, keys_read,
        values_ready, values_read, head, first_row, start, rows, first_block, blocks, query_row,
        query_head, factor, window,
    )  # fmt: skip
    constants: gl.constexpr = (HEADS, D, HAS_WINDOW, ROWS // 2, KEYS, STAGES)
    gl.warp_specialize(
        [
            (_attend_upper, (shared, constants)),
            (_attend_lower, (shared, constants)),
            (
                _copy_pages,
                (
                    keys, values, key_buffers, value_buffers, keys_ready, keys_read, values_ready,
                    values_read, table, head // GROUP, blocks, STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _copy_pages(
    keys,
    values,
    key_buffers,
    value_buffers,
    keys_ready,
    keys_read,
    values_ready,
    values_read,
    table,
    kv_head,
    blocks,
    STAGES: gl.constexpr,
):
    next_page = gl.load(table)
    for block in range(blocks):
        page = next_page
        next_page = gl.load(table + block + 1, mask=block + 1 < blocks, other=0)
        stage = block % STAGES
        phase = (block // STAGES + 1) & 1
        mbarrier.wait(keys_read.index(stage), phase)
        mbarrier.expect(keys_ready.index(stage), keys.block_type.nbytes)
        tma.async_copy_global_to_shared(
            keys, [page, kv_head, 0, 0], keys_ready.index(stage), key_buffers.index(stage)
        )
        mbarrier.wait(values_read.index(stage), phase)
        mbarrier.expect(values_ready.index(stage), values.block_type.nbytes)
        tma.async_copy_global_to_shared(
            values, [page, kv_head, 0, 0], values_ready.index(stage), value_buffers.index(stage)
        )


@gluon.jit
def _attend_upper(shared, constants: gl.constexpr):
    _attend(shared, constants, 0)


@gluon.jit
def _attend_lower(shared, constants: gl.constexpr):
    _attend(shared, constants, 1)


@gluon.jit
def _attend(shared, constants: gl.constexpr, HALF: gl.constexpr):
    (
        query, keys, values, out, q_buffers, key_buffers, value_buffers, keys_ready, keys_read,
        values_ready, values_read, head, first_row, start, rows, first_block, blocks, query_row,
        query_head, factor, window,
    ) = shared  # fmt: skip
    HEADS: gl.constexpr = constants[0]
    D: gl.constexpr = constants[1]
    HAS_WINDOW: gl.constexpr = constants[2]
    ROWS: gl.constexpr = constants[3]
    KEYS: gl.constexpr = constants[4]
    STAGES: gl.constexpr = constants[5]
    dtype: gl.constexpr = keys.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    scores_rows: gl.constexpr = gl.SliceLayout(1, scores_layout)
    acc_rows: gl.constexpr = gl.SliceLayout(1, acc_layout)
    plain: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    end = start + rows
    full = gl.maximum(end - window, 0)  # from here on no row's window hides a key

    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, plain)) + HALF * ROWS
    d = gl.arange(0, D, layout=gl.SliceLayout(0, plain))
    row = (first_row + r).to(gl.int64)
    q = gl.load(
        query + row[:, None] * query_row + head * query_head + d[None, :],
        mask=(r < rows)[:, None],
        other=0.0,
    )
    q_shared = q_buffers.index(HALF)
    q_shared.store(q)
    fence_async_shared()

    own_start = start + HALF * ROWS
    position = own_start + gl.arange(0, ROWS, layout=scores_rows)
    n = gl.arange(0, KEYS, layout=gl.SliceLayout(0, scores_layout))
    no_scores = gl.zeros([ROWS, KEYS], gl.float32, scores_layout)
    m = gl.full([ROWS], float("-inf"), gl.float32, scores_rows)
    total = gl.zeros([ROWS], gl.float32, scores_rows)
    acc = gl.zeros([ROWS, D], gl.float32, acc_layout)

    mbarrier.wait(keys_ready.index(0), 0)
    k = _buffer(keys, key_buffers, 0, KEYS, D, STAGES)
    scores = warpgroup_mma(q_shared, k.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(keys_read.index(0), count=1)
    m, total, shrink, weights = _softmax(
        scores, m, total, first_block * KEYS, full, position, n, own_start, factor, window,
        HAS_WINDOW, KEYS, dtype, weights_layout,
    )  # fmt: skip

    for block in range(1, blocks):
        stage = block % STAGES
        before = (block - 1) % STAGES
        mbarrier.wait(keys_ready.index(stage), (block // STAGES) & 1)
        k = _buffer(keys, key_buffers, block, KEYS, D, STAGES)
        scores = warpgroup_mma(q_shared, k.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        mbarrier.wait(values_ready.index(before), ((block - 1) // STAGES) & 1)
        v = _buffer(values, value_buffers, block - 1, KEYS, D, STAGES)
        acc = warpgroup_mma(weights, v, acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        mbarrier.arrive(keys_read.index(stage), count=1)
        m, total, shrink, next_weights = _softmax(
            scores, m, total, (first_block + block) * KEYS, full, position, n, own_start, factor,
            window, HAS_WINDOW, KEYS, dtype, weights_layout,
        )  # fmt: skip
        acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
        mbarrier.arrive(values_read.index(before), count=1)
        acc = acc * gl.convert_layout(shrink, acc_rows)[:, None]
        weights = next_weights

    last = blocks - 1
    mbarrier.wait(values_ready.index(last % STAGES), (last // STAGES) & 1)
    v = _buffer(values, value_buffers, last, KEYS, D, STAGES)
    if (first_block + blocks) * KEYS > end:
        # Keys beyond the end may never have been written, or not with finite numbers. Both groups clear
        # them, each before it reads them.
        token = gl.arange(0, KEYS, layout=gl.SliceLayout(1, plain)) + (first_block + last) * KEYS
        v.store(gl.where((token < end)[:, None], v.load(plain), 0.0).to(dtype))
        fence_async_shared()
    acc = warpgroup_mma(weights, v, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    result = acc / gl.convert_layout(gl.where(total == 0, 1.0, total), acc_rows)[:, None]
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
