"""Writes a step's keys and values to their pages."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from workers.attention.batch import BatchTensors
from workers.contract import PAGE_TOKENS


def store(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, tensors: BatchTensors) -> None:
    """Write each row's KV, as the pool's dtype, at its sequence's position; skip rows of padding.

    Args:
        key: [T,Hk,D], dimensions contiguous; rows at negative positions are padding.
        value: [T,Hk,Dv].
        keys: [num_pages, page_tokens, Hk, D], one layer's view into the pool.
        values: [num_pages, page_tokens, Hk, Dv].
    """
    rows, kv_heads, dim = key.shape
    value_dim = value.shape[2]
    assert key.stride(2) == value.stride(2) == 1
    _store_kernel[(rows,)](
        key,
        value,
        keys,
        values,
        tensors.positions,
        tensors.row_slots,
        tensors.block_table,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        keys.stride(0),
        values.stride(0),
        tensors.block_table.stride(0),
        KV_HEADS=kv_heads,
        D=dim,
        DV=value_dim,
        PAGE=PAGE_TOKENS,
        BLOCK_K=triton.next_power_of_2(kv_heads * dim),
        BLOCK_V=triton.next_power_of_2(kv_heads * value_dim),
    )


@triton.jit
def _store_kernel(
    key,
    value,
    keys,
    values,
    positions,
    row_slots,
    block_table,
    key_row,
    key_head,
    value_row,
    value_head,
    key_page,
    value_page,
    table_row,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    slot = tl.load(row_slots + row)
    if position < 0:
        return
    page = tl.load(block_table + slot * table_row + position // PAGE).to(tl.int64)
    offset = position % PAGE
    i = tl.arange(0, BLOCK_K)
    k = tl.load(key + row * key_row + (i // D) * key_head + i % D, mask=i < KV_HEADS * D)
    place = keys + page * key_page + offset * (KV_HEADS * D)
    tl.store(place + i, k.to(keys.dtype.element_ty), mask=i < KV_HEADS * D)
    j = tl.arange(0, BLOCK_V)
    v = tl.load(value + row * value_row + (j // DV) * value_head + j % DV, mask=j < KV_HEADS * DV)
    place = values + page * value_page + offset * (KV_HEADS * DV)
    tl.store(place + j, v.to(values.dtype.element_ty), mask=j < KV_HEADS * DV)
