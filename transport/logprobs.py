"""Frame 1 of a `TokenBatch`: the logprobs of its rows, as the worker writes and the frontend reads them.

A record of 1 + 2k words of 4 bytes a token, k being the number of likely tokens that its row wants:
chosen logprob (float32), k token ids (int32), k logprobs (float32), little-endian.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import zmq

LOWEST = -9999.0
"""What minus infinity is read as: JSON cannot say that."""


class SampledLogprobs(Protocol):
    """What an engine tells of a token that it sampled: at least as many likely tokens as are wanted."""

    @property
    def chosen(self) -> float: ...
    @property
    def top_ids(self) -> npt.NDArray[np.int32]: ...
    @property
    def top_logprobs(self) -> npt.NDArray[np.float32]: ...


class TokenLogprob(msgspec.Struct, frozen=True):
    """Logprobs of one token: its own, and the most likely tokens with theirs."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


class LogprobWriter:
    """Writes the records of a batch, in the order of its rows."""

    def __init__(self) -> None:
        self._records: list[npt.NDArray[np.int32]] = []

    def write(self, found: SampledLogprobs, top: int) -> None:
        record = np.empty(1 + 2 * top, dtype="<i4")
        record[:1].view("<f4")[0] = found.chosen
        record[1 : 1 + top] = found.top_ids[:top]
        record[1 + top :].view("<f4")[:] = found.top_logprobs[:top]
        self._records.append(record)

    def frame(self) -> memoryview:
        return np.concatenate(self._records).data.cast("B")


class LogprobReader:
    """Reads the records row by row."""

    def __init__(self, frame: zmq.Frame) -> None:
        self._words = np.frombuffer(frame.buffer, dtype="<i4")
        self._floats = self._words.view("<f4")
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
