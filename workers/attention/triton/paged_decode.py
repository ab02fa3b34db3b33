"""Decode attention over pages: one query token for each sequence, keys and values read in place.

Only the device knows lengths. A small kernel, run once a step, cuts all sequences into pieces of about equal
size, as many as keep the GPU busy. The attention kernel runs one program for each piece and key head. The
program that ends last of a sequence and head adds up their pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.attention.math import AttentionOptions
from workers.attention.triton.softmax import base_2_factor, finish, scored
from workers.contract import PAGE_TOKENS

_ITEM_WORDS: Final = 8
_ITEMS_PER_PROGRAM: Final = 32
_NO_WINDOW: Final = 1 << 30
_BUFFERS_BYTES: Final = 72 << 10
"""Of shared memory for keys and values under way; three programs then share a multiprocessor of an H200."""
_COMBINED_FLOATS: Final = 8192
"""Floats of partial results that a program combines at a time."""


@dataclass(frozen=True)
class DecodePlan:
    """How one step's sequences are cut into pieces, for all layers with the same window.

    Layers use it one after the other: it holds the memory for their partial results.
    """

    items: Tensor
    """int32 [M, 8]: row of the batch (-1: no piece), slot, first key, end, oldest key that counts, index of
    the row's first piece, number of its pieces, page of the first key."""
    counters: Tensor
    """int32 [B, Hk]: pieces that are done; 0 between layers."""
    key_block: int
    """Keys that a program reads at a time; pieces start at multiples of it."""


def choose_key_block(query: Tensor, keys: Tensor, values: Tensor) -> int:
    """Keys that a program should read at a time."""
    if query.dtype == torch.float32 or keys.dtype != query.dtype:
        return 32
    return 64 if max(keys.shape[3], values.shape[3]) <= 128 else 32


def choose_programs(batch: int, kv_heads: int, processors: int) -> int:
    """Programs that keep `processors` multiprocessors busy to the end.

    Few sequences are cut into as many equal pieces as run at once. Where whole sequences fill the GPU twice,
    pieces are only for what is longer than half of an even share.
    """
    at_once = 2 * processors
    return at_once if batch * kv_heads < 2 * at_once else 2 * at_once


def plan_decode(
    positions: Tensor,
    slots: Tensor,
    block_table: Tensor,
    *,
    kv_heads: int,
    window: int | None,
    programs: int,
    key_block: int,
) -> DecodePlan:
    """Only enqueues work; the plan's size follows from the batch size.

    Args:
        positions: int64 [B], of each query token; negative: a row of padding.
        slots: int64 [B].
        block_table: int32 [slots, max_pages].
        programs: how many the attention kernel should run at least, if there are enough keys.
        key_block: divides `PAGE_TOKENS`.
    """
    batch = len(positions)
    target = max(1, programs // kv_heads)
    count = batch + target
    items = torch.empty(count, _ITEM_WORDS, dtype=torch.int32, device=positions.device)
    counters = torch.empty(batch, kv_heads, dtype=torch.int32, device=positions.device)
    _plan_kernel[(triton.cdiv(count, _ITEMS_PER_PROGRAM),)](
        positions,
        slots,
        block_table,
        items,
        counters,
        block_table.stride(0),
        batch,
        count,
        target,
        _NO_WINDOW if window is None else window,
        kv_heads,
        PAGE=PAGE_TOKENS,
        KEYS=key_block,
        ROWS=triton.next_power_of_2(batch),
        ITEMS=_ITEMS_PER_PROGRAM,
        WORDS=_ITEM_WORDS,
    )
    return DecodePlan(items, counters, key_block)


@triton.jit(do_not_specialize=["batch", "count", "target", "window", "kv_heads"])
def _plan_kernel(
    positions,
    slots,
    block_table,
    items,
    counters,
    table_row,
    batch,
    count,
    target,
    window,
    kv_heads,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    ITEMS: tl.constexpr,
    WORDS: tl.constexpr,
):
    program = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    exists = rows < batch
    ends = tl.load(positions + rows, mask=exists, other=-1).to(tl.int32) + 1
    firsts = tl.maximum(ends - window, 0) // KEYS
    blocks = tl.where(exists, tl.maximum(tl.cdiv(ends, KEYS) - firsts, 0), 0)
    share = tl.maximum(tl.cdiv(tl.sum(blocks), target), 1)
    pieces = tl.where(exists, tl.maximum(tl.cdiv(blocks, share), 1), 0)
    upto = tl.cumsum(pieces)

    item = program * ITEMS + tl.arange(0, ITEMS)
    before = upto[None, :] <= item[:, None]
    row = tl.sum(before.to(tl.int32), axis=1)
    is_piece = row < batch
    first_item = tl.sum(tl.where(before, pieces[None, :], 0), axis=1)
    end = tl.maximum(tl.load(positions + row, mask=is_piece, other=-1).to(tl.int32) + 1, 0)
    slot = tl.load(slots + row, mask=is_piece, other=0).to(tl.int32)
    low = tl.maximum(end - window, 0)
    first = low // KEYS
    count_blocks = tl.cdiv(end, KEYS) - first
    count_pieces = tl.maximum(tl.cdiv(count_blocks, share), 1)
    piece = item - first_item
    begin = (first + piece * count_blocks // count_pieces) * KEYS
    stop = tl.minimum((first + (piece + 1) * count_blocks // count_pieces) * KEYS, end)

    # Known here, it saves every program of the attention kernel one wait for memory.
    column = slot.to(tl.int64) * table_row + begin // PAGE
    page = tl.load(block_table + column, mask=is_piece & (begin < stop), other=0)

    record = items + item * WORDS
    is_item = item < count
    tl.store(record, tl.where(is_piece, row, -1), mask=is_item)
    tl.store(record + 1, slot, mask=is_item)
    tl.store(record + 2, begin, mask=is_item)
    tl.store(record + 3, stop, mask=is_item)
    tl.store(record + 4, low, mask=is_item)
    tl.store(record + 5, first_item, mask=is_item)
    tl.store(record + 6, count_pieces, mask=is_item)
    tl.store(record + 7, page, mask=is_item)
    for head in range(kv_heads):
        tl.store(counters + rows * kv_heads + head, 0, mask=exists & (program == 0))


def paged_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    plan: DecodePlan,
    options: AttentionOptions,
) -> Tensor:
    """Attention of one token for each sequence over all of its keys. Only enqueues work.

    Args:
        query: [B,H,D]; its KV is in the pages already.
        keys: [num_pages, page_tokens, Hk, D], one layer's view into the pool; any dtype.
        values: [num_pages, page_tokens, Hk, Dv].
        block_table: int32 [slots, max_pages].
        plan: of this step and of the layer's window.

    Returns:
        [B,H,Dv]; zeros for rows of padding.
    """
    batch, heads, dim = query.shape
    assert query.stride(2) == 1
    kv_heads, value_dim = values.shape[2:]
    group = heads // kv_heads
    count = len(plan.items)
    out = torch.empty(batch, heads, value_dim, dtype=query.dtype, device=query.device)
    partials = torch.empty(count, heads, value_dim, dtype=torch.float32, device=query.device)
    stats = torch.empty(count, heads, 2, dtype=torch.float32, device=query.device)
    block_bytes = plan.key_block * (dim + value_dim) * keys.element_size()
    group_block = triton.next_power_of_2(group)
    value_block = max(16, triton.next_power_of_2(value_dim))
    _decode_kernel[(kv_heads, count)](
        query,
        keys,
        values,
        options.sinks,
        out,
        plan.items,
        block_table,
        plan.counters,
        partials,
        stats,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        values.stride(0),
        block_table.stride(0),
        options.scaling,
        options.softcap,
        GROUP=group,
        KV_HEADS=kv_heads,
        D=dim,
        DV=value_dim,
        PAGE=PAGE_TOKENS,
        KEYS=plan.key_block,
        WORDS=_ITEM_WORDS,
        BLOCK_H=max(16, group_block),
        BLOCK_G=group_block,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        BLOCK_DV=value_block,
        BLOCK_P=max(1, min(32, _COMBINED_FLOATS // (group_block * value_block))),
        num_warps=4,
        num_stages=3 if 2 * block_bytes <= _BUFFERS_BYTES else 2,
    )
    return out


@triton.jit
def _decode_kernel(
    query,
    keys,
    values,
    sinks,
    out,
    items,
    block_table,
    counters,
    partials,
    stats,
    query_row,
    query_head,
    key_page,
    value_page,
    table_row,
    scaling,
    softcap,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    head = tl.program_id(0)
    item = tl.program_id(1)
    record = items + item * WORDS
    row = tl.load(record)
    slot = tl.load(record + 1)
    begin = tl.load(record + 2)
    end = tl.load(record + 3)
    low = tl.load(record + 4)
    first_item = tl.load(record + 5)
    pieces = tl.load(record + 6)
    next_page = tl.load(record + 7)
    if row < 0:
        return
    HEADS: tl.constexpr = GROUP * KV_HEADS
    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_DV)
    n = tl.arange(0, KEYS)
    q = tl.load(
        query
        + row.to(tl.int64) * query_row
        + (head * GROUP + h)[:, None] * query_head
        + d[None, :],
        mask=(h < GROUP)[:, None] & (d < D)[None, :],
        other=0.0,
    )
    table = block_table + slot.to(tl.int64) * table_row
    key_head = keys + head * D
    value_head = values + head * DV
    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_DV], tl.float32)
    begin = tl.multiple_of(begin, KEYS)
    factor = base_2_factor(scaling, softcap)
    # Each page number is loaded one block ahead, so that no copy of keys waits for it.
    for at in tl.range(begin, end, KEYS):
        page = next_page.to(tl.int64)
        next_page = tl.load(table + tl.minimum(at + KEYS, end - 1) // PAGE)
        # Keys beyond the end may never have been written: the last one is read in their place.
        offset = tl.minimum(at + n, end - 1) % PAGE
        k = tl.load(
            key_head + page * key_page + (offset * (KV_HEADS * D))[:, None] + d[None, :],
            mask=(d < D)[None, :],
            other=0.0,
        )
        v = tl.load(
            value_head + page * value_page + (offset * (KV_HEADS * DV))[:, None] + e[None, :],
            mask=(e < DV)[None, :],
            other=0.0,
        )
        scores = tl.dot(q, k.to(q.dtype).T, input_precision="ieee")
        scores = scored(scores, scaling, softcap)
        counts = (at + n < end) & (at + n >= low)
        scores = tl.where(counts[None, :], scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1) * factor)
        weights = tl.exp2(scores * factor - m_new[:, None])
        shrink = tl.exp2(m - m_new)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
        m = m_new

    first_head = head * GROUP
    if pieces == 1:
        result = finish(acc, m, total, sinks, first_head + h, h < GROUP)
        tl.store(
            out + (row.to(tl.int64) * HEADS + first_head + h)[:, None] * DV + e[None, :],
            result.to(out.dtype.element_ty),
            mask=(h < GROUP)[:, None] & (e < DV)[None, :],
        )
        return
    place = item.to(tl.int64) * HEADS + first_head + h
    tl.store(stats + place * 2, m, mask=h < GROUP)
    tl.store(stats + place * 2 + 1, total, mask=h < GROUP)
    tl.store(
        partials + place[:, None] * DV + e[None, :],
        acc,
        mask=(h < GROUP)[:, None] & (e < DV)[None, :],
    )
    tl.debug_barrier()
    counter = counters + row * KV_HEADS + head
    done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if done == pieces - 1:
        tl.store(counter, 0)
        _combine(
            partials, stats, sinks, out, row, first_item, pieces, first_head,
            HEADS, GROUP, DV, BLOCK_G, BLOCK_DV, BLOCK_P,
        )  # fmt: skip


@triton.jit
def _combine(
    partials,
    stats,
    sinks,
    out,
    row,
    first_item,
    pieces,
    first_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Write the output of one key head's query heads from the partial results of all pieces."""
    g = tl.arange(0, BLOCK_G)
    e = tl.arange(0, BLOCK_DV)
    m = tl.full([BLOCK_G], -1e30, tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_DV], tl.float32)
    for at in tl.range(0, pieces, BLOCK_P):
        piece = at + tl.arange(0, BLOCK_P)
        place = (first_item + piece).to(tl.int64)[:, None] * HEADS + (first_head + g)[None, :]
        there = (piece < pieces)[:, None] & (g < GROUP)[None, :]
        piece_m = tl.load(stats + place * 2, mask=there, other=-1e30, cache_modifier=".cg")
        piece_total = tl.load(stats + place * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        part = tl.load(
            partials + place[:, :, None] * DV + e[None, None, :],
            mask=there[:, :, None] & (e < DV)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        m_new = tl.maximum(m, tl.max(piece_m, 0))
        weight = tl.exp2(piece_m - m_new[None, :])
        shrink = tl.exp2(m - m_new)
        total = total * shrink + tl.sum(weight * piece_total, 0)
        acc = acc * shrink[:, None] + tl.sum(weight[:, :, None] * part, 0)
        m = m_new
    result = finish(acc, m, total, sinks, first_head + g, g < GROUP)
    tl.store(
        out + (row.to(tl.int64) * HEADS + first_head + g)[:, None] * DV + e[None, :],
        result.to(out.dtype.element_ty),
        mask=(g < GROUP)[:, None] & (e < DV)[None, :],
    )
