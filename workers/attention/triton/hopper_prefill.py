"""Prompt attention for Hopper GPUs: what `paged_prefill` does for 16-bit types, a third faster.

One warp copies pages to shared memory. Two groups of four warps each attend half of a tile's rows. While a
group computes the softmax of one block of keys, the tensor cores add the values of the block before, or work
for the other group. Triton cannot be told so; Gluon, its lower level, can.
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
from workers.attention.triton.paged_prefill import (
    NO_WINDOW,
    TILE_ROWS,
    TILE_WORDS,
    can_copy_in_bulk,
)
from workers.contract import PAGE_TOKENS

_LARGEST_DIM: Final = 128
_SMALLEST_BLOCK: Final = 64
_STAGES: Final = 2
"""Blocks of keys, and of values, in shared memory."""
_LOG2_E: Final = gl.constexpr(1.4426950408889634)
_TYPES: Final = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def is_covered(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether `hopper_prefill` can be used instead of `paged_prefill`."""
    return (
        query.is_cuda
        and torch.cuda.get_device_capability(query.device)[0] == 9
        and query.dtype in _TYPES
        and keys.dtype == query.dtype
        and max(keys.shape[3], values.shape[3]) <= _LARGEST_DIM
        and can_copy_in_bulk(keys, values)
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
    kv_heads, value_dim = values.shape[2:]
    out = torch.empty(rows, heads, value_dim, dtype=query.dtype, device=query.device)
    _prefill_kernel[(heads, len(tiles) // TILE_WORDS)](
        query,
        _describe(keys),
        _describe(values),
        options.sinks,
        out,
        tiles,
        block_table,
        query.stride(0),
        query.stride(1),
        block_table.stride(0),
        options.scaling,
        options.softcap,
        NO_WINDOW if options.window is None else options.window,
        HEADS=heads,
        GROUP=heads // kv_heads,
        D=dim,
        DV=value_dim,
        WORDS=TILE_WORDS,
        HAS_WINDOW=options.window is not None,
        ROWS=TILE_ROWS,
        STAGES=_STAGES,
        num_warps=4,
    )
    return out


def _describe(pages: Tensor) -> TensorDescriptor:
    """Of [page, head, token, dim], to load all tokens of one head, padded with zeros to a power of two."""
    by_head = pages.transpose(1, 2)
    dim_block = max(_SMALLEST_BLOCK, triton.next_power_of_2(pages.shape[3]))
    block = [1, 1, PAGE_TOKENS, dim_block]
    layout = gl.NVMMASharedLayout.get_default_for(block, _TYPES[pages.dtype])
    return TensorDescriptor(pages, list(by_head.shape), list(by_head.stride()), block, layout)


@gluon.jit
def _buffer(desc, buffers, stage):
    """A copy of a page in shared memory, as [tokens, dim]."""
    shape: gl.constexpr = [desc.block_shape[2], desc.block_shape[3]]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, desc.dtype)
    return buffers.index(stage)._reinterpret(desc.dtype, shape, layout)


@gluon.jit(do_not_specialize=["window"])
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
    table_row,
    scaling,
    softcap,
    window,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    DV: gl.constexpr,
    WORDS: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
):
    dtype: gl.constexpr = keys.dtype
    KEYS: gl.constexpr = keys.block_shape[2]
    BLOCK_D: gl.constexpr = keys.block_shape[3]
    BLOCK_DV: gl.constexpr = values.block_shape[3]
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

    key_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, KEYS, BLOCK_D], keys.layout)
    value_buffers = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, KEYS, BLOCK_DV], values.layout)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS // 2, BLOCK_D], dtype)
    q_buffers = gl.allocate_shared_memory(dtype, [2, ROWS // 2, BLOCK_D], q_layout)
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
        query, keys, values, sinks, out, q_buffers, key_buffers, value_buffers, keys_ready,
        keys_read, values_ready, values_read, head, first_row, start, rows, first_block, blocks,
        query_row, query_head, scaling, softcap, window,
    )  # fmt: skip
    constants: gl.constexpr = (HEADS, D, DV, HAS_WINDOW, ROWS // 2, STAGES)
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
        query, keys, values, sinks, out, q_buffers, key_buffers, value_buffers, keys_ready,
        keys_read, values_ready, values_read, head, first_row, start, rows, first_block, blocks,
        query_row, query_head, scaling, softcap, window,
    ) = shared  # fmt: skip
    HEADS: gl.constexpr = constants[0]
    D: gl.constexpr = constants[1]
    DV: gl.constexpr = constants[2]
    HAS_WINDOW: gl.constexpr = constants[3]
    ROWS: gl.constexpr = constants[4]
    STAGES: gl.constexpr = constants[5]
    KEYS: gl.constexpr = keys.block_shape[2]
    BLOCK_D: gl.constexpr = keys.block_shape[3]
    BLOCK_DV: gl.constexpr = values.block_shape[3]
    dtype: gl.constexpr = keys.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    scores_rows: gl.constexpr = gl.SliceLayout(1, scores_layout)
    acc_rows: gl.constexpr = gl.SliceLayout(1, acc_layout)
    plain: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    end = start + rows
    full = gl.maximum(end - window, 0)  # from here on no row's window hides a key

    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, plain)) + HALF * ROWS
    d = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, plain))
    e = gl.arange(0, BLOCK_DV, layout=gl.SliceLayout(0, plain))
    row = (first_row + r).to(gl.int64)
    q = gl.load(
        query + row[:, None] * query_row + head * query_head + d[None, :],
        mask=(r < rows)[:, None] & (d < D)[None, :],
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
    acc = gl.zeros([ROWS, BLOCK_DV], gl.float32, acc_layout)

    mbarrier.wait(keys_ready.index(0), 0)
    k = _buffer(keys, key_buffers, 0)
    scores = warpgroup_mma(q_shared, k.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(keys_read.index(0), count=1)
    m, total, shrink, weights = _softmax(
        scores, m, total, first_block * KEYS, full, position, n, own_start, scaling, softcap,
        window, HAS_WINDOW, dtype, weights_layout,
    )  # fmt: skip

    for block in range(1, blocks):
        stage = block % STAGES
        before = (block - 1) % STAGES
        mbarrier.wait(keys_ready.index(stage), (block // STAGES) & 1)
        k = _buffer(keys, key_buffers, stage)
        scores = warpgroup_mma(q_shared, k.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        mbarrier.wait(values_ready.index(before), ((block - 1) // STAGES) & 1)
        v = _buffer(values, value_buffers, before)
        acc = warpgroup_mma(weights, v, acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        mbarrier.arrive(keys_read.index(stage), count=1)
        m, total, shrink, next_weights = _softmax(
            scores, m, total, (first_block + block) * KEYS, full, position, n, own_start, scaling,
            softcap, window, HAS_WINDOW, dtype, weights_layout,
        )  # fmt: skip
        acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
        mbarrier.arrive(values_read.index(before), count=1)
        acc = acc * gl.convert_layout(shrink, acc_rows)[:, None]
        weights = next_weights

    last = blocks - 1
    mbarrier.wait(values_ready.index(last % STAGES), (last // STAGES) & 1)
    v = _buffer(values, value_buffers, last % STAGES)
    if (first_block + blocks) * KEYS > end:
        # Keys beyond the end may never have been written, or not with finite numbers. Both groups clear
        # them, each before it reads them.
        token = gl.arange(0, KEYS, layout=gl.SliceLayout(1, plain)) + (first_block + last) * KEYS
        v.store(gl.where((token < end)[:, None], v.load(plain), 0.0).to(dtype))
        fence_async_shared()
    acc = warpgroup_mma(weights, v, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    if sinks is not None:
        # In base 2, and kept from growing the sum beyond what float32 holds.
        sink = gl.load(sinks + head).to(gl.float32) * _LOG2_E
        m_all = gl.maximum(m, sink)
        shrink = gl.exp2(m - m_all)
        total = total * shrink + gl.exp2(sink - m_all)
        acc = acc * gl.convert_layout(shrink, acc_rows)[:, None]
    result = acc / gl.convert_layout(gl.where(total == 0, 1.0, total), acc_rows)[:, None]
    gl.store(
        out + (row * HEADS + head)[:, None] * DV + e[None, :],
        gl.convert_layout(result.to(out.dtype.element_ty), plain),
        mask=(r < rows)[:, None] & (e < DV)[None, :],
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
    scaling,
    softcap,
    window,
    HAS_WINDOW: gl.constexpr,
    dtype: gl.constexpr,
    weights_layout: gl.constexpr,
):
    """One step of the online softmax, for the block of keys that starts at `at`."""
    if softcap is None:
        factor = scaling * _LOG2_E
    else:
        tanh = 1 - 2 / (gl.exp2(scores * (2 * scaling / softcap * _LOG2_E)) + 1)
        scores = tanh * softcap
        factor = scaling * 0 + _LOG2_E
    masked = at + n.shape[0] > start + 1
    if HAS_WINDOW:
        masked = masked | (at < full)
    if masked:
        seen = (at + n)[None, :] <= position[:, None]
        if HAS_WINDOW:
            seen = seen & ((at + n)[None, :] > position[:, None] - window)
        scores = gl.where(seen, scores, float("-inf"))
    m_new = gl.maximum(m, gl.max(scores, 1) * factor)
    # A row that has seen no key yet keeps its sums at zero.
    base = gl.where(m_new == float("-inf"), 0.0, m_new)
    weights = gl.exp2(scores * factor - base[:, None])
    shrink = gl.exp2(m - base)
    total = total * shrink + gl.sum(weights, 1)
    return m_new, total, shrink, gl.convert_layout(weights.to(dtype), weights_layout)
