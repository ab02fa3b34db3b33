"""Messages to the router, from frontends, tokenizers and workers."""

from __future__ import annotations

from typing import Final

from msgspec.msgpack import Decoder

from transport.ids import DpRank, RequestId
from transport.messages.base import Hello, Message
from transport.messages.generate import (
    Cancel,
    Encode,
    Encoded,
    Generate,
    ModelInfo,
    PromptKind,
    RequestFailed,
    Throttle,
    TokenBatch,
)


class WorkerReady(Message, frozen=True):
    """A worker has loaded its model and takes sequences."""

    rank: DpRank
    model: ModelInfo
    max_num_seqs: int


class SequenceFailed(Message, frozen=True):
    """A worker cannot go on with a choice; the router ends the whole request with this error."""

    request_id: RequestId
    index: int
    status: int
    code: str
    message: str


class Submit(Message, frozen=True):
    """A new request. Frame 0: the prompt — for `chat` a `Conversation` as JSON,
    for `text` UTF-8, for `tokens` int32 ids."""

    request_id: RequestId
    kind: PromptKind
    generate: Generate
    received_at: float
    """CLOCK_MONOTONIC seconds at which the frontend had read the request."""
    n: int = 1
    affinity: str = ""
    """Conversation key: the same value prefers the same tokenizer and rank. Empty: none."""
    add_special_tokens: bool = True
    """For `text`: let the tokenizer add its own begin and end tokens."""
    call: RequestId = RequestId("")
    """The HTTP request, where this is one of its several prompts: `--max-waiting` counts it once."""
    call_choices: int = 0
    """Choices of all prompts of the HTTP request; 0: there is but this prompt."""


FromFrontend = Submit | Encode | Cancel | Throttle
FromTokenizer = Encoded | RequestFailed
FromWorker = WorkerReady | TokenBatch | SequenceFailed
RouterWork = FromFrontend | FromTokenizer | FromWorker
ToRouter = Hello | RouterWork
TO_ROUTER: Final[Decoder[ToRouter]] = Decoder(ToRouter)
