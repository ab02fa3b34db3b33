"""What travels with a request through several processes: how to generate, and what came of it."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from transport.ids import ProcessName, RequestId
from transport.messages.base import Message

ALL_CHOICES: Final = -1
"""As a choice index: every choice of the request."""


PromptKind = Literal["chat", "text", "tokens"]


CancelCause = Literal["client", "stop", "slow_reader", "shutdown", "failed"]
"""`failed`: on the server's side."""


RUNNING: Final = 0


FINISH_STOP: Final = 1
"""The last token of the row is the end-of-sequence or a stop token; it is not part of the text."""

FINISH_LENGTH: Final = 2


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, gc=False, omit_defaults=True):
    """How to choose the tokens of one choice. All values are validated by the frontend."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 = no limit."""
    min_p: float = 0.0
    seed: int = 0
    """64-bit; always set (drawn at random by the frontend where the client gave none)."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int = -1
    """-1: none; k >= 0: the chosen token's logprob and the k most likely ones."""
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()


class Generate(msgspec.Struct, frozen=True, array_like=True, gc=False, omit_defaults=True):
    """How to answer a prompt. Made by the frontend and kept by the worker's sequence; whoever is in
    between passes it on as it is. An option for the engine is a field here or in `SamplingParams`."""

    sampling: SamplingParams
    priority: int = 0
    """Lower runs sooner."""
    prefix_cache: bool = True
    """Whether the prompt may be taken from the prefix cache and stored in it."""
    cache_salt: str = ""
    """Only requests with the same salt share cached prefixes."""


class ModelInfo(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the other processes need to know of the model, found out by a worker that loaded it."""

    vocab_size: int
    """Number of logits: ids in `logit_bias` and `stop_token_ids` must be below it."""
    max_model_len: int
    """Prompt plus output, in tokens."""
    eos_token_ids: tuple[int, ...]
    pool_tokens: int
    """Tokens that fit into the smallest rank's device pool."""


class TokenBatch(Message, frozen=True):
    """All that one engine step yielded for one frontend. Row i: `request_ids[i]`, choice
    `indexes[i]`, `counts[i]` tokens, `finish[i]`.

    Frame 0: the rows' token ids, int32, concatenated in row order.
    Frame 1 (only if some `logprobs[i]` >= 0): per token of such a row 1 + 2k words of 4 bytes,
    k = `logprobs[i]`: chosen logprob (float32), k token ids (int32), k logprobs (float32).
    Logprobs are those of the model's own distribution, before temperature, penalties and bias.
    """

    frontend: ProcessName
    step: int
    request_ids: list[RequestId]
    indexes: list[int]
    counts: list[int]
    finish: list[int]
    logprobs: list[int] = []
    """Empty, or one entry a row: k, or -1 for a row without logprobs."""
    started: list[tuple[RequestId, int, int, int]] = []
    """(request, choice index, cached prompt tokens, prompt tokens) of sequences whose first chunk
    ran in this step. May name sequences that have no row."""


class Cancel(Message, frozen=True):
    """Stop working on a request or on one of its choices; idempotent. Also router -> tokenizer, which
    answers the prompt's `Encode` with `RequestFailed` then, and router -> worker."""

    request_id: RequestId
    index: int = ALL_CHOICES
    cause: CancelCause = "client"


class Throttle(Message, frozen=True):
    """Pause (or resume) a choice whose client reads too slowly. Also router -> worker."""

    request_id: RequestId
    index: int
    paused: bool


class Encode(Message, frozen=True):
    """Render and encode a prompt without running it. Frame 0 as for `Submit`.
    Also router -> tokenizer, for every request."""

    request_id: RequestId
    kind: PromptKind
    add_special_tokens: bool = True
    affinity: str = ""


class Encoded(Message, frozen=True):
    """Frame 0: token ids, int32."""

    request_id: RequestId
    render_seconds: float = 0.0
    encode_seconds: float = 0.0


class RequestFailed(Message, frozen=True):
    """A request ends without (further) tokens, with an error for the client. From a tokenizer to the
    router, and from the router to the frontend."""

    request_id: RequestId
    status: int
    """HTTP status."""
    code: str
    """Machine-readable, e.g. `context_length_exceeded`."""
    message: str
    param: str | None = None
    retry_after: int | None = None
    """Seconds, for 429 and 503."""


class StageTimes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """CLOCK_MONOTONIC seconds at which a request entered each stage; 0.0 = never."""

    received: float = 0.0
    tokenizing: float = 0.0
    queued: float = 0.0
    running: float = 0.0
    finished: float = 0.0
