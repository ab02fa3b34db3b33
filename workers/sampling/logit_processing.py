"""Changes to logits and probabilities before a token is drawn. Pure tensor functions plus the
per-slot token counts that penalties need. Nothing here reads a device value on the host."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)
_STEP = np.uint64(0x9E3779B97F4A7C15)


def random_words(
    seeds: np.ndarray[tuple[int], np.dtype[np.uint64]],
    positions: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """One uniform 32-bit word per (seed, position), a pure function of the two.

    Two rounds of a 64-bit avalanche make neighbouring seeds and positions unrelated.
    """
    with np.errstate(over="ignore"):
        state = _avalanche(seeds + _STEP)
        state = _avalanche(state ^ (positions.astype(np.uint64) * _STEP + _MIX_A))
    return (state >> np.uint64(32)).astype(np.uint32)


def _avalanche(
    value: np.ndarray[tuple[int], np.dtype[np.uint64]],
) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    value = (value ^ (value >> np.uint64(30))) * _MIX_A
    value = (value ^ (value >> np.uint64(27))) * _MIX_B
    return value ^ (value >> np.uint64(31))


class TokenCounts:
    """Per slot, how often each token was generated and which tokens occurred at all."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self.generated = torch.zeros(slots, vocab_size, dtype=torch.int32, device=device)
        self.seen = torch.zeros(slots, vocab_size, dtype=torch.bool, device=device)

    def reset(self, slot: int) -> None:
        self.generated[slot].zero_()
        self.seen[slot].zero_()

    def add(self, slot: int, prompt: Tensor, generated: Tensor) -> None:
        """Count tokens, int64 [n], that the slot's sequence already has."""
        self.seen[slot].index_fill_(0, prompt, True)
        self.seen[slot].index_fill_(0, generated, True)
        ones = torch.ones_like(generated, dtype=torch.int32)
        self.generated[slot].index_add_(0, generated, ones)

    def add_sampled(self, slots: Tensor, tokens: Tensor) -> None:
        """Count one new token for each of `slots`, which are all different. Both are int64 [R]."""
        place = (slots, tokens)
        self.generated[place] += 1
        # A tensor of ones, not the constant: storing a host scalar by index waits for the GPU.
        self.seen.index_put_(place, torch.ones_like(tokens, dtype=torch.bool))


def apply_penalties(
    logits: Tensor,
    generated: Tensor,
    seen: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> Tensor:
    """Return a penalised copy of `logits` [R,V].

    Repetition divides positive and multiplies negative logits of tokens in `seen`. Then frequency (times the
    count in `generated`) and presence (once) are subtracted. Strengths are [R].
    """
    factor = repetition[:, None]
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    penalised = torch.where(seen, repeated, logits)
    penalised = penalised - frequency[:, None] * generated
    return penalised - presence[:, None] * (generated > 0)


def filter_probabilities(
    probabilities: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, ranked: bool
) -> Tensor:
    """Zero what top-k, top-p and min-p exclude, in `probabilities` [R,V]. Parameters are [R].

    Top-p counts within what top-k keeps. `top_k` 0, `top_p` 1 and `min_p` 0 exclude nothing. Tokens that tie
    with the last kept one stay. `ranked` says that some row has top-k or top-p, so a sort is needed.
    """
    threshold = min_p * probabilities.amax(-1)
    if ranked:
        ordered = probabilities.sort(-1, descending=True).values
        rank = torch.arange(ordered.shape[1], device=ordered.device)
        limit = torch.where(top_k > 0, top_k, ordered.shape[1]).clamp(max=ordered.shape[1])
        within = torch.where(rank < limit[:, None], ordered, 0.0).double()
        mass = within.cumsum(-1)
        before = mass - within
        nucleus = (before < top_p[:, None] * mass[:, -1:]) & (rank < limit[:, None])
        kept = torch.where(top_p < 1, nucleus.sum(-1).clamp(min=1), limit)
        last = ordered.gather(1, kept[:, None] - 1)[:, 0]
        threshold = torch.where(kept < ordered.shape[1], torch.maximum(threshold, last), threshold)
    return torch.where(probabilities >= threshold[:, None], probabilities, 0.0)


def draw(probabilities: Tensor, words: Tensor) -> Tensor:
    """Invert the cumulative distribution of unnormalised `probabilities` [R,V] at `words`.

    `words` is int32 [R] and holds uniform 32-bit words. Returns token ids, int64 [R], of positive
    probability.
    """
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    # The bits of a uint32 in an int32; + 0.5 keeps the point strictly inside (0, 1).
    unsigned = words.to(torch.float64) % 2.0**32
    target = (unsigned + 0.5) / 2.0**32 * cumulative[:, -1]
    index = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return index.clamp(max=probabilities.shape[1] - 1)
