"""`LayerOps` as Triton kernels: one launch each, arithmetic in float32."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from workers.kernels.layer_ops import Activation, HeadShape, Norm

_GATE_BLOCK: Final = 1024
_HEADS_AT_ONCE: Final = 8


class TritonLayerOps:
    """Implements `LayerOps` on a CUDA GPU."""

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        out = torch.empty_like(x)
        self._norm_rows(x, None, norm, out, x)
        return out

    def add_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        out, total = torch.empty_like(x), torch.empty_like(x)
        self._norm_rows(x, residual, norm, out, total)
        return out, total

    def _norm_rows(
        self, x: Tensor, residual: Tensor | None, norm: Norm, out: Tensor, total: Tensor
    ) -> None:
        width = x.shape[1]
        block = triton.next_power_of_2(width)
        _norm_kernel[(x.shape[0],)](
            x,
            residual,
            norm.weight,
            out,
            total,
            norm.eps,
            width,
            HAS_RESIDUAL=residual is not None,
            ROUNDS_FIRST=norm.rounds_first,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )

    def rotate(
        self,
        qkv: Tensor,
        shape: HeadShape,
        rotary: tuple[Tensor, Tensor],
        norms: tuple[Norm, Norm] | None,
    ) -> Tensor:
        rotated = shape.heads + shape.kv_heads
        heads_at_once = min(_HEADS_AT_ONCE, triton.next_power_of_2(rotated))
        cos, sin = rotary
        query, key = norms if norms is not None else (None, None)
        _rotate_kernel[(qkv.shape[0], triton.cdiv(rotated, heads_at_once))](
            qkv,
            cos,
            sin,
            None if query is None else query.weight,
            None if key is None else key.weight,
            0.0 if query is None else query.eps,
            shape.heads,
            rotated,
            shape.width,
            HALF=shape.dim // 2,
            HALF_BLOCK=triton.next_power_of_2(shape.dim // 2),
            HEADS=heads_at_once,
            HAS_NORMS=norms is not None,
            num_warps=4,
        )
        return qkv

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight, bias)

    def gated_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation
    ) -> Tensor:
        gate_up = functional.linear(x, weight, bias)
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        _gate_kernel[(rows, triton.cdiv(width, _GATE_BLOCK))](
            gate_up, out, width, SILU=activation == "silu", BLOCK=_GATE_BLOCK, num_warps=4
        )
        return out


@triton.jit
def _norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    eps,
    width,
    HAS_RESIDUAL: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + start + columns, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        others = tl.load(residual + start + columns, mask=inside, other=0.0)
        values = (values.to(tl.float32) + others.to(tl.float32)).to(values.dtype)
        tl.store(total + start + columns, values, mask=inside)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    scaled = wide * scale
    if ROUNDS_FIRST:
        scaled = scaled.to(values.dtype).to(tl.float32)
    gains = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + start + columns, (scaled * gains).to(values.dtype), mask=inside)


@triton.jit
def _rotate_kernel(
    qkv,
    cos,
    sin,
    query_weight,
    key_weight,
    eps,
    query_heads,
    rotated_heads,
    width,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, HALF_BLOCK)
    inside = columns < HALF
    places = qkv + row * width + heads[:, None] * (2 * HALF) + columns[None]
    mask = (heads[:, None] < rotated_heads) & inside[None]
    stored = tl.load(places, mask=mask, other=0.0)
    first = stored.to(tl.float32)
    second = tl.load(places + HALF, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORMS:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        is_query = (heads < query_heads)[:, None]
        gains = tl.load(query_weight + columns, mask=inside, other=0.0)[None]
        others = tl.load(key_weight + columns, mask=inside, other=0.0)[None]
        first = (first * scale).to(stored.dtype).to(tl.float32)
        first = (first * tl.where(is_query, gains, others)).to(stored.dtype).to(tl.float32)
        gains = tl.load(query_weight + HALF + columns, mask=inside, other=0.0)[None]
        others = tl.load(key_weight + HALF + columns, mask=inside, other=0.0)[None]
        second = (second * scale).to(stored.dtype).to(tl.float32)
        second = (second * tl.where(is_query, gains, others)).to(stored.dtype).to(tl.float32)
    angles = row * (2 * HALF) + columns
    cos_first = tl.load(cos + angles, mask=inside, other=0.0).to(tl.float32)[None]
    sin_first = tl.load(sin + angles, mask=inside, other=0.0).to(tl.float32)[None]
    cos_second = tl.load(cos + angles + HALF, mask=inside, other=0.0).to(tl.float32)[None]
    sin_second = tl.load(sin + angles + HALF, mask=inside, other=0.0).to(tl.float32)[None]
    tl.store(places, (first * cos_first - second * sin_first).to(stored.dtype), mask=mask)
    turned = second * cos_second + first * sin_second
    tl.store(places + HALF, turned.to(stored.dtype), mask=mask)


@triton.jit
def _gate_kernel(gate_up, out, width, SILU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    if SILU:
        active = wide * tl.sigmoid(wide)
    else:
        # The approximation of GELU by tanh, with 1 + tanh(x) = 2 * sigmoid(2x).
        active = wide * tl.sigmoid(1.5957691216057308 * (wide + 0.044715 * wide * wide * wide))
    product = active.to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * width + columns, product.to(gate.dtype), mask=inside)
