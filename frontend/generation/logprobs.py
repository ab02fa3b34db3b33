"""Logprobs as they come from the router."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


class TokenLogprob(msgspec.Struct, frozen=True):
    """Logprobs of one token: its own, and the most likely tokens with theirs."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


class LogprobReader:
    """Reads frame 1 of a `TokenBatch`, row by row."""

    def __init__(self, words: npt.NDArray[np.int32]) -> None:
        self._words = words
        self._floats = words.view(np.float32)
        self._at = 0

    def read(self, ids: list[int], top: int) -> list[TokenLogprob]:
        """The logprobs of a row's tokens, `top` likely ones each."""
        read: list[TokenLogprob] = []
        for token_id in ids:
            start = self._at + 1
            top_ids = self._words[start : start + top].tolist()
            values = self._floats[start + top : start + 2 * top].tolist()
            chosen = float(self._floats[self._at])
            pairs = [(i, max(v, LOWEST)) for i, v in zip(top_ids, values, strict=True)]
            read.append(TokenLogprob(token_id, max(chosen, LOWEST), pairs))
            self._at = start + 2 * top
        return read
