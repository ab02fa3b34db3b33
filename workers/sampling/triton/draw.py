"""Random draws on a CUDA GPU without sorting a vocabulary: one program a row.

Which probabilities stay is a threshold, and a threshold is found by its bits: positive floats are ordered as
their bits are. Two bits are found at a time, by sums over the row. Probabilities are computed anew from the
logits wherever they are needed, which costs less than to store them.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK: Final = 4096


def draw_tokens(
    logits: Tensor,
    rows: Tensor,
    parameters: Tensor,
    words: Tensor,
) -> Tensor:
    """Draw one token for each of `rows`.

    `filter_probabilities` and `draw` of `logit_processing` are its reference.

    Args:
        logits: [T,V], any float type.
        rows: int32 [R], of `logits`.
        parameters: float32 [R,4], in memory as it says: temperature, above 0; top-k, whole numbers, with 0
            for no limit; top-p; min-p.
        words: int32 [R], uniform 32-bit words.

    Returns:
        int64 [R].
    """
    assert parameters.is_contiguous() and logits.stride(1) == 1
    vocabulary = logits.shape[1]
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    _draw_kernel[(len(rows),)](
        logits,
        logits.stride(0),
        rows,
        parameters,
        words,
        tokens,
        vocabulary,
        BLOCK=min(_BLOCK, triton.next_power_of_2(vocabulary)),
        num_warps=16,
    )
    return tokens


@triton.jit
def _probabilities(row, at, vocabulary, scale, peak, total, BLOCK: tl.constexpr):
    """Those of the columns from `at` on, [BLOCK]; 0 beyond the vocabulary."""
    columns = at + tl.arange(0, BLOCK)
    x = tl.load(row + columns, mask=columns < vocabulary, other=float("-inf"))
    return tl.exp(x.to(tl.float32) * scale - peak) / total


@triton.jit
def _normaliser(row, vocabulary, scale, BLOCK: tl.constexpr):
    """Return the largest scaled logit and the sum of the exponentials of what lies below it."""
    columns = tl.arange(0, BLOCK)
    peaks = tl.full((BLOCK,), -3e38, tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for at in range(0, vocabulary, BLOCK):
        x = tl.load(row + at + columns, mask=at + columns < vocabulary, other=float("-inf"))
        x = x.to(tl.float32) * scale
        higher = tl.maximum(peaks, x)
        sums = sums * tl.exp(peaks - higher) + tl.exp(x - higher)
        peaks = higher
    peak = tl.max(peaks, axis=0)
    return peak, tl.sum(sums * tl.exp(peaks - peak), axis=0)


@triton.jit
def _above(row, bits, vocabulary, scale, peak, total, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Number (with COUNT) or sum of the probabilities whose bits exceed each of `bits` [4], in float64."""
    columns = tl.arange(0, BLOCK)
    totals = tl.zeros((BLOCK, 4), tl.int32 if COUNT else tl.float64)
    for at in range(0, vocabulary, BLOCK):
        p = _probabilities(row, at, vocabulary, scale, peak, total, BLOCK)
        own = tl.where(at + columns < vocabulary, p.to(tl.int32, bitcast=True), -1)
        above = own[:, None] > bits[None, :]
        if COUNT:
            totals += above.to(tl.int32)
        else:
            totals += tl.where(above, p[:, None].to(tl.float64), 0.0)
    return tl.sum(totals, axis=0).to(tl.float64)


@triton.jit
def _threshold(
    row, limit, vocabulary, scale, peak, total, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """The least bits of which the number or mass above is less than `limit`."""
    low = tl.full((), -1, tl.int32)  # the mass above it is too large, or it is -1
    digits = tl.arange(0, 4)
    for turn in range(16):
        # Four candidates, one step apart; the last one is known to be enough.
        step = 1 << (30 - 2 * turn)
        bits = low + (digits + 1) * step
        bits = tl.where(bits <= low, 0x7FFFFFFF, bits)  # beyond the largest number
        mass = _above(row, bits, vocabulary, scale, peak, total, COUNT, BLOCK)
        low += tl.sum((mass >= limit).to(tl.int32), axis=0) * step
    return low + 1


@triton.jit
def _draw_kernel(
    logits,
    stride,
    rows,
    parameters,
    words,
    tokens,
    vocabulary,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0)
    row = logits + tl.load(rows + index).to(tl.int64) * stride
    scale = 1.0 / tl.load(parameters + 4 * index)
    limit = tl.load(parameters + 4 * index + 1)
    nucleus = tl.load(parameters + 4 * index + 2)
    peak, total = _normaliser(row, vocabulary, scale, BLOCK)
    least = tl.load(parameters + 4 * index + 3) / total
    whole = tl.full((), 0.0, tl.float64)
    ranked = (limit > 0) & (limit < vocabulary)
    if ranked:
        bits = _threshold(row, limit.to(tl.float64), vocabulary, scale, peak, total, True, BLOCK)
        last = bits.to(tl.float32, bitcast=True)
        least = tl.maximum(least, last)
        if nucleus < 1:
            every = tl.full((4,), 0, tl.int32) + bits
            mass = _above(row, every, vocabulary, scale, peak, total, False, BLOCK)
            number = _above(row, every, vocabulary, scale, peak, total, True, BLOCK)
            left = limit.to(tl.float64) - tl.max(number, axis=0)
            whole = tl.max(mass, axis=0) + left * last.to(tl.float64)
    if nucleus < 1:
        if not ranked:
            whole = _mass(row, 0.0, vocabulary, scale, peak, total, BLOCK)
        goal = nucleus.to(tl.float64) * whole
        bits = _threshold(row, goal, vocabulary, scale, peak, total, False, BLOCK)
        least = tl.maximum(least, bits.to(tl.float32, bitcast=True))
    token = _invert(row, least, tl.load(words + index), vocabulary, scale, peak, total, BLOCK)
    tl.store(tokens + index, token.to(tl.int64))


@triton.jit
def _mass(row, least, vocabulary, scale, peak, total, BLOCK: tl.constexpr):
    """Sum, in float64, of the probabilities of at least `least`."""
    sums = tl.zeros((BLOCK,), tl.float64)
    for at in range(0, vocabulary, BLOCK):
        p = _probabilities(row, at, vocabulary, scale, peak, total, BLOCK)
        sums += tl.where(p >= least, p, 0.0).to(tl.float64)
    return tl.sum(sums, axis=0)


@triton.jit
def _invert(row, least, word, vocabulary, scale, peak, total, BLOCK: tl.constexpr):
    """The index at which the sum of the probabilities of at least `least` passes `word`."""
    columns = tl.arange(0, BLOCK)
    unsigned = word.to(tl.uint32, bitcast=True).to(tl.float64)
    mass = _mass(row, least, vocabulary, scale, peak, total, BLOCK)
    target = (unsigned + 0.5) / 4294967296.0 * mass
    before = tl.full((), 0.0, tl.float64)
    found = tl.full((), -1, tl.int32)
    final = tl.full((), 0, tl.int32)
    at = 0
    while (at < vocabulary) & (found < 0):
        p = _probabilities(row, at, vocabulary, scale, peak, total, BLOCK)
        kept = tl.where(p >= least, p, 0.0).to(tl.float64)
        inside = tl.sum(kept, axis=0)
        if before + inside > target:
            reached = before + tl.cumsum(kept, axis=0)
            passes = (reached > target) & (kept > 0)
            first = tl.min(tl.where(passes, at + columns, 0x7FFFFFFF), axis=0)
            found = tl.where(first < 0x7FFFFFFF, first, found)
        final = tl.maximum(final, tl.max(tl.where(kept > 0, at + columns, 0), axis=0))
        before += inside
        at += BLOCK
    # Sums in another order may differ in their last bits, so that none passes.
    return tl.where(found < 0, final, found)
