"""Random draws on a CUDA GPU without sorting a vocabulary: one program a row.

Which probabilities stay is a threshold, and a threshold is found by its bits: positive floats are ordered as
their bits are. Four bits are found at a time, by sixteen sums over the row, so a row is read eight times.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK: Final = 1024


def draw_tokens(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, words: Tensor
) -> Tensor:
    """Draw one token per row: `filter_probabilities` and `draw` of `logit_processing` in one launch.

    Args:
        logits: [R,V], any float type.
        temperature: float32 [R], above 0; so are `top_p` and `min_p`.
        top_k: float32 [R], whole numbers; 0: no limit.
        words: int32 [R], uniform 32-bit words.

    Returns:
        int64 [R].
    """
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    probabilities = torch.empty(rows, vocabulary, dtype=torch.float32, device=logits.device)
    _draw_kernel[(rows,)](
        logits,
        logits.stride(0),
        probabilities,
        temperature,
        top_k,
        top_p,
        min_p,
        words,
        tokens,
        vocabulary,
        BLOCK=min(_BLOCK, triton.next_power_of_2(vocabulary)),
        num_warps=8,
    )
    return tokens


@triton.jit
def _softmax(logits, out, temperature, vocabulary, BLOCK: tl.constexpr):
    """Store the probabilities of a row and return the largest one."""
    columns = tl.arange(0, BLOCK)
    peaks = tl.full((BLOCK,), float("-inf"), tl.float32)
    for at in range(0, vocabulary, BLOCK):
        inside = at + columns < vocabulary
        x = tl.load(logits + at + columns, mask=inside, other=float("-inf"))
        peaks = tl.maximum(peaks, x.to(tl.float32) / temperature)
    peak = tl.max(peaks, axis=0)
    sums = tl.zeros((BLOCK,), tl.float32)
    for at in range(0, vocabulary, BLOCK):
        inside = at + columns < vocabulary
        x = tl.load(logits + at + columns, mask=inside, other=float("-inf"))
        weight = tl.exp(x.to(tl.float32) / temperature - peak)
        sums += weight
        tl.store(out + at + columns, weight, mask=inside)
    total = tl.sum(sums, axis=0)
    tl.debug_barrier()
    for at in range(0, vocabulary, BLOCK):
        inside = at + columns < vocabulary
        weight = tl.load(out + at + columns, mask=inside, other=0.0)
        tl.store(out + at + columns, weight / total, mask=inside)
    tl.debug_barrier()
    return 1.0 / total


@triton.jit
def _mass_above(row, bits, vocabulary, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Number (with COUNT) or sum of the probabilities whose bits exceed each of `bits` [16], in float64."""
    columns = tl.arange(0, BLOCK)
    totals = tl.zeros((BLOCK, 16), tl.int32 if COUNT else tl.float64)
    for at in range(0, vocabulary, BLOCK):
        inside = at + columns < vocabulary
        p = tl.load(row + at + columns, mask=inside, other=0.0)
        own = tl.where(inside, p.to(tl.int32, bitcast=True), -1)
        above = own[:, None] > bits[None, :]
        if COUNT:
            totals += above.to(tl.int32)
        else:
            totals += tl.where(above, p[:, None].to(tl.float64), 0.0)
    return tl.sum(totals, axis=0).to(tl.float64)


@triton.jit
def _threshold(row, limit, vocabulary, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The least bits of which the number or mass above is less than `limit`."""
    low = tl.full((), -1, tl.int32)  # the mass above it is too large, or it is -1
    digits = tl.arange(0, 16)
    for turn in range(8):
        # Sixteen candidates, one step apart; the last one is known to be enough.
        step = 1 << (28 - 4 * turn)
        bits = low + (digits + 1) * step
        bits = tl.where(bits <= low, 0x7FFFFFFF, bits)  # beyond the largest number
        fails = _mass_above(row, bits, vocabulary, COUNT, BLOCK) >= limit
        low += tl.sum(fails.to(tl.int32), axis=0) * step
    return low + 1


@triton.jit
def _draw_kernel(
    logits,
    stride,
    probabilities,
    temperature,
    top_k,
    top_p,
    min_p,
    words,
    tokens,
    vocabulary,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = probabilities + index * vocabulary
    peak = _softmax(logits + index * stride, row, tl.load(temperature + index), vocabulary, BLOCK)
    least = tl.load(min_p + index) * peak
    limit = tl.load(top_k + index)
    nucleus = tl.load(top_p + index)
    whole = tl.full((), 1.0, tl.float64)
    if (limit > 0) & (limit < vocabulary):
        bits = _threshold(row, limit.to(tl.float64), vocabulary, True, BLOCK)
        last = bits.to(tl.float32, bitcast=True)
        every = tl.full((16,), 0, tl.int32) + bits
        above = tl.max(_mass_above(row, every, vocabulary, False, BLOCK), axis=0)
        number = tl.max(_mass_above(row, every, vocabulary, True, BLOCK), axis=0)
        whole = above + (limit.to(tl.float64) - number) * last.to(tl.float64)
        least = tl.maximum(least, last)
    if nucleus < 1:
        if (limit <= 0) | (limit >= vocabulary):
            whole = tl.sum(_sums(row, 0.0, vocabulary, BLOCK), axis=0)
        bits = _threshold(row, nucleus.to(tl.float64) * whole, vocabulary, False, BLOCK)
        least = tl.maximum(least, bits.to(tl.float32, bitcast=True))
    _invert(row, least, tl.load(words + index), tokens + index, vocabulary, BLOCK)


@triton.jit
def _sums(row, least, vocabulary, BLOCK: tl.constexpr):
    """Sums, float64 [BLOCK], of the probabilities of at least `least`."""
    columns = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float64)
    for at in range(0, vocabulary, BLOCK):
        p = tl.load(row + at + columns, mask=at + columns < vocabulary, other=0.0)
        sums += tl.where(p >= least, p, 0.0).to(tl.float64)
    return sums


@triton.jit
def _invert(row, least, word, token, vocabulary, BLOCK: tl.constexpr):
    """Store the index at which the sum of the probabilities of at least `least` passes `word`."""
    columns = tl.arange(0, BLOCK)
    unsigned = word.to(tl.uint32, bitcast=True).to(tl.float64)
    target = (unsigned + 0.5) / 4294967296.0 * tl.sum(_sums(row, least, vocabulary, BLOCK), axis=0)
    before = tl.full((), 0.0, tl.float64)
    found = tl.full((), -1, tl.int32)
    final = tl.full((), 0, tl.int32)
    for at in range(0, vocabulary, BLOCK):
        p = tl.load(row + at + columns, mask=at + columns < vocabulary, other=0.0)
        kept = tl.where(p >= least, p, 0.0).to(tl.float64)
        reached = before + tl.cumsum(kept, axis=0)
        passes = (reached > target) & (kept > 0)
        first = tl.min(tl.where(passes, at + columns, 0x7FFFFFFF), axis=0)
        found = tl.where((found < 0) & (first < 0x7FFFFFFF), first, found)
        final = tl.maximum(final, tl.max(tl.where(kept > 0, at + columns, 0), axis=0))
        before += tl.sum(kept, axis=0)
    # The two ways of summing may differ in their last bits.
    tl.store(token, tl.where(found < 0, final, found).to(tl.int64))
