"""Random draws on a CUDA GPU without sorting a vocabulary: one program a row.

Which probabilities stay is a threshold. One pass over the row finds the binade in which it lies, another
gathers the probabilities of that binade, mostly few, and among those it is found by its bits: positive floats
are ordered as their bits are. Probabilities are computed anew from the logits wherever they are needed, which
costs less than to store them.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK: Final = 4096
_RANK_BLOCK: Final = 1024
"""Where sixteen or four sums are kept for each column."""


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
    scratch = torch.empty(len(rows), vocabulary, dtype=torch.int32, device=logits.device)
    _draw_kernel[(len(rows),)](
        logits,
        logits.stride(0),
        rows,
        parameters,
        words,
        tokens,
        scratch,
        vocabulary,
        BLOCK=min(_BLOCK, triton.next_power_of_2(vocabulary)),
        RANK_BLOCK=min(_RANK_BLOCK, triton.next_power_of_2(vocabulary)),
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
def _coarse(row, vocabulary, scale, peak, total, BLOCK: tl.constexpr):
    """Number and sum of the probabilities above the largest one times 2**-1 ... 2**-16.

    Returns the bits of those sixteen edges, int32, the numbers, int32, and the sums, float64.
    """
    edges = tl.exp2(-1.0 - tl.arange(0, 16).to(tl.float32)) / total
    bits = edges.to(tl.int32, bitcast=True)
    columns = tl.arange(0, BLOCK)
    numbers = tl.zeros((BLOCK, 16), tl.int32)
    sums = tl.zeros((BLOCK, 16), tl.float64)
    for at in range(0, vocabulary, BLOCK):
        p = _probabilities(row, at, vocabulary, scale, peak, total, BLOCK)
        own = tl.where(at + columns < vocabulary, p.to(tl.int32, bitcast=True), -1)
        above = own[:, None] > bits[None, :]
        numbers += above.to(tl.int32)
        sums += tl.where(above, p[:, None], 0.0).to(tl.float64)
    return bits, tl.sum(numbers, axis=0), tl.sum(sums, axis=0)


@triton.jit
def _gather(row, found, low, high, vocabulary, scale, peak, total, BLOCK: tl.constexpr):
    """Store the bits in low+1 ... high of probabilities at `found`. Returns how many there are."""
    columns = tl.arange(0, BLOCK)
    count = tl.full((), 0, tl.int32)
    for at in range(0, vocabulary, BLOCK):
        p = _probabilities(row, at, vocabulary, scale, peak, total, BLOCK)
        own = tl.where(at + columns < vocabulary, p.to(tl.int32, bitcast=True), -1)
        here = (own > low) & (own <= high)
        places = count + tl.cumsum(here.to(tl.int32), axis=0) - 1
        tl.store(found + places, own, mask=here)
        count += tl.sum(here.to(tl.int32), axis=0)
    tl.debug_barrier()
    return count


@triton.jit
def _above(found, count, bits, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Number (with COUNT) or sum of the probabilities at `found` whose bits exceed each of `bits` [4]."""
    columns = tl.arange(0, BLOCK)
    totals = tl.zeros((BLOCK, 4), tl.float64)
    for at in range(0, count, BLOCK):
        own = tl.load(found + at + columns, mask=at + columns < count, other=-1)
        amounts = own.to(tl.float32, bitcast=True).to(tl.float64)
        if COUNT:
            amounts = tl.full((BLOCK,), 1.0, tl.float64)
        totals += tl.where(own[:, None] > bits[None, :], amounts[:, None], 0.0)
    return tl.sum(totals, axis=0)


@triton.jit
def _threshold(
    row,
    found,
    limit,
    bits,
    reached,
    vocabulary,
    scale,
    peak,
    total,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    FOUND_BLOCK: tl.constexpr,
):
    """Find the least bits above which number or mass is less than `limit`.

    `bits` and `reached` are edges and what lies above them. Returns the threshold's bits, and the number or
    mass above it.
    """
    enough = reached >= limit
    low = tl.max(tl.where(enough, bits, -1), axis=0)
    high = tl.min(tl.where(enough, 0x7F000000, bits), axis=0)
    base = tl.max(tl.where(enough, 0.0, reached), axis=0)
    count = _gather(row, found, low, high, vocabulary, scale, peak, total, BLOCK)
    digits = tl.arange(0, 4)
    for turn in range(16):
        # Four candidates, one step apart; the last one is known to be enough.
        step = 1 << (30 - 2 * turn)
        tried = low + (digits + 1) * step
        tried = tl.where((tried <= low) | (tried > high), high, tried)
        mass = base + _above(found, count, tried, COUNT, FOUND_BLOCK)
        low += tl.sum((mass >= limit).to(tl.int32), axis=0) * step
    least = low + 1
    every = tl.full((4,), 0, tl.int32) + least
    return least, base + tl.max(_above(found, count, every, COUNT, FOUND_BLOCK), axis=0)


@triton.jit
def _draw_kernel(
    logits,
    stride,
    rows,
    parameters,
    words,
    tokens,
    scratch,
    vocabulary,
    BLOCK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
):
    index = tl.program_id(0)
    row = logits + tl.load(rows + index).to(tl.int64) * stride
    found = scratch + index.to(tl.int64) * vocabulary
    scale = 1.0 / tl.load(parameters + 4 * index)
    limit = tl.load(parameters + 4 * index + 1)
    nucleus = tl.load(parameters + 4 * index + 2)
    peak, total = _normaliser(row, vocabulary, scale, BLOCK)
    least = tl.load(parameters + 4 * index + 3) / total
    ranked = (limit > 0) & (limit < vocabulary)
    if ranked | (nucleus < 1):
        bits, numbers, sums = _coarse(row, vocabulary, scale, peak, total, RANK_BLOCK)
        whole = _mass(row, 0.0, vocabulary, scale, peak, total, BLOCK)
        if ranked:
            kept, above = _threshold(
                row, found, limit.to(tl.float64), bits, numbers.to(tl.float64), vocabulary, scale, peak,
                total, True, BLOCK, RANK_BLOCK,
            )  # fmt: skip
            last = kept.to(tl.float32, bitcast=True)
            least = tl.maximum(least, last)
            if nucleus < 1:
                mass = _mass_above(row, kept, vocabulary, scale, peak, total, BLOCK)
                whole = mass + (limit.to(tl.float64) - above) * last.to(tl.float64)
        if nucleus < 1:
            tl.debug_barrier()
            kept, above = _threshold(
                row, found, nucleus.to(tl.float64) * whole, bits, sums, vocabulary, scale, peak,
                total, False, BLOCK, RANK_BLOCK,
            )  # fmt: skip
            least = tl.maximum(least, kept.to(tl.float32, bitcast=True))
    token = _invert(row, least, tl.load(words + index), vocabulary, scale, peak, total, BLOCK)
    tl.store(tokens + index, token.to(tl.int64))


@triton.jit
def _mass_above(row, bits, vocabulary, scale, peak, total, BLOCK: tl.constexpr):
    """Sum, in float64, of the probabilities whose bits exceed `bits`."""
    sums = tl.zeros((BLOCK,), tl.float64)
    for at in range(0, vocabulary, BLOCK):
        p = _probabilities(row, at, vocabulary, scale, peak, total, BLOCK)
        sums += tl.where(p.to(tl.int32, bitcast=True) > bits, p, 0.0).to(tl.float64)
    return tl.sum(sums, axis=0)


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
