"""Logprobs on the wire from the router, and in the two forms that clients know."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from frontend.generation.text_decoding import TokenTexts
from frontend.http.json_body import JsonObject

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


def chat_entry(texts: TokenTexts, logprob: TokenLogprob) -> JsonObject:
    """An entry of `logprobs.content` of a chat."""
    entry = _chat_token(texts, logprob.token_id, logprob.logprob)
    entry["top_logprobs"] = [_chat_token(texts, *pair) for pair in logprob.top]
    return entry


def _chat_token(texts: TokenTexts, token_id: int, value: float) -> JsonObject:
    return {
        "token": texts.token_text(token_id),
        "logprob": value,
        "bytes": list(texts.token_bytes(token_id)),
    }


def completion_logprobs(
    texts: TokenTexts, logprobs: list[TokenLogprob], offsets: list[int]
) -> JsonObject:
    """`logprobs` of a completion; `offsets` are where the tokens' texts start, in characters."""
    return {
        "tokens": [_completion_token(texts, entry.token_id) for entry in logprobs],
        "token_logprobs": [entry.logprob for entry in logprobs],
        # Should two tokens have the same text, the more likely one stays.
        "top_logprobs": [
            {_completion_token(texts, token_id): value for token_id, value in reversed(entry.top)}
            for entry in logprobs
        ],
        "text_offset": offsets,
    }


def _completion_token(texts: TokenTexts, token_id: int) -> str:
    """A token as completions name it: its text, or `bytes:\\xe2\\x80` where it is no whole one; as
    U+FFFD all of those would be one key."""
    raw = texts.token_bytes(token_id)
    try:
        raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    return texts.token_text(token_id)
