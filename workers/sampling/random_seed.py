"""Seeds of choices and the random numbers of tokens: pure functions, the same on every rank."""

from __future__ import annotations

from typing import Final

MASK: Final = (1 << 64) - 1


def mix64(value: int) -> int:
    """A bijective 64-bit mixer (the finaliser of SplitMix64, Steele et al. 2014)."""
    value &= MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def choice_seed(seed: int, index: int) -> int:
    """Choice 0 keeps the request's own seed."""
    return (seed & MASK) if index == 0 else mix64((seed & MASK) + index * 0x9E3779B97F4A7C15)
