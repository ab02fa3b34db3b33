"""Matrix products of a few rows: a GPU reads each weight once and computes almost nothing.

A program reads whole rows of the weights, so nothing is left to be summed by another kernel, and what follows
the product (a sum, a gate) is done before it is stored.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

MAX_ROWS: Final = 4
"""From here on the matrix units pay."""
_BLOCK_K: Final = 1024


def few_rows_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, gated: bool = False
) -> Tensor:
    """`x` [M,K] times `weight` [N,K], M <= MAX_ROWS, in float32.

    With `gated` the result is [M,N/2]: SiLU of the first half of the columns times the second.
    """
    rows, inner = x.shape
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    out = x.new_empty(rows, columns)
    block_n = 2 if gated else 4
    _few_rows_kernel[(triton.cdiv(columns, block_n),)](
        x,
        weight,
        bias,
        out,
        rows,
        columns,
        inner,
        HAS_BIAS=bias is not None,
        GATED=gated,
        BLOCK_M=triton.next_power_of_2(rows),
        BLOCK_N=block_n,
        BLOCK_K=min(_BLOCK_K, triton.next_power_of_2(inner)),
        num_warps=4,
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _few_rows_kernel(
    x,
    weight,
    bias,
    out,
    rows,
    columns,
    inner,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m = tl.arange(0, BLOCK_M)
    places = weight + n.to(tl.int64)[:, None] * inner + k[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_N, BLOCK_K), tl.float32)
    gates = tl.zeros((BLOCK_M, BLOCK_N, BLOCK_K), tl.float32)
    for at in range(0, inner, BLOCK_K):
        inside = k < inner - at
        there = (n < columns)[:, None] & inside[None, :]
        inputs = tl.load(
            x + m[:, None] * inner + at + k[None, :],
            mask=(m < rows)[:, None] & inside[None, :],
            other=0.0,
        ).to(tl.float32)[:, None, :]
        weights = tl.load(places + at, mask=there, other=0.0).to(tl.float32)
        sums += inputs * weights[None]
        if GATED:
            weights = tl.load(places + at + columns.to(tl.int64) * inner, mask=there, other=0.0)
            gates += inputs * weights.to(tl.float32)[None]
    result = tl.sum(sums, axis=2)
    if HAS_BIAS:
        result += tl.load(bias + n, mask=n < columns, other=0.0).to(tl.float32)[None]
    if GATED:
        other = tl.sum(gates, axis=2)
        if HAS_BIAS:
            other += tl.load(bias + columns + n, mask=n < columns, other=0.0).to(tl.float32)[None]
        # Rounded where a product and a gate of their own would round.
        result = result.to(x.dtype.element_ty).to(tl.float32)
        other = other.to(x.dtype.element_ty).to(tl.float32)
        active = (result * tl.sigmoid(result)).to(x.dtype.element_ty).to(tl.float32)
        result = active * other
    tl.store(
        out + m[:, None] * columns + n[None, :],
        result.to(x.dtype.element_ty),
        mask=(m < rows)[:, None] & (n < columns)[None, :],
    )
