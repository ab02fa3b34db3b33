"""A checked request to generate, whatever dialect of the API it came in."""

from __future__ import annotations

import hashlib

import msgspec

from frontend.conversation import Conversation
from frontend.errors import bad_request
from frontend.generation.stop_strings import StopRule
from frontend.settings import SamplingDefaults
from transport.framing import token_frame
from transport.messages.generate import Generate, PromptKind

AFFINITY_CHARACTERS = 1024
"""How much of a text's beginning tells its conversation."""
AFFINITY_TOKENS = 256
TOKEN_BYTES = 4


class ModelLimits(msgspec.Struct, frozen=True):
    """What the served model and the instance's settings allow."""

    model_name: str
    vocab_size: int
    max_model_len: int
    max_choices: int
    """Largest `n`."""
    sampling: SamplingDefaults = SamplingDefaults()
    max_token_bytes: int | None = None
    """How much text one token may stand for; None: that is not known."""
    allow_priority: bool = False


class Prompt(msgspec.Struct, frozen=True):
    """One prompt, as `Submit` and `Encode` carry it."""

    kind: PromptKind
    frame: bytes
    affinity: str = ""
    add_special_tokens: bool = True
    echo: str | list[int] | None = None
    """What a completion with `echo` repeats: the text, or ids to decode."""


class GenerationRequest(msgspec.Struct, frozen=True):
    prompts: list[Prompt]
    generate: Generate
    stops: StopRule
    n: int
    """Choices of each prompt."""
    stream: bool
    include_usage: bool
    continuous_usage: bool

    @property
    def echoes_ids(self) -> bool:
        return any(isinstance(prompt.echo, list) for prompt in self.prompts)

    @property
    def wants_logprobs(self) -> bool:
        return self.generate.sampling.logprobs >= 0


def chat_prompt(conversation: Conversation) -> Prompt:
    """
    Raises:
        ApiError: 400, it cannot be passed on: an integer beyond 64 bits, or nested too deeply.
    """
    try:
        frame = msgspec.json.encode(conversation)
    except (msgspec.MsgspecError, OverflowError, RecursionError) as error:
        raise bad_request(f"messages or tools cannot be passed on: {error}.", "messages") from error
    return Prompt("chat", frame, _digest(conversation.beginning().encode()))


def text_prompt(text: str, add_special_tokens: bool, echo: bool = False) -> Prompt:
    beginning = text[:AFFINITY_CHARACTERS].encode()
    return Prompt(
        "text", text.encode(), _digest(beginning), add_special_tokens, text if echo else None
    )


def token_prompt(ids: list[int], echo: bool = False) -> Prompt:
    frame = bytes(token_frame(ids))
    beginning = frame[: AFFINITY_TOKENS * TOKEN_BYTES]
    return Prompt("tokens", frame, _digest(beginning), echo=ids if echo else None)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
