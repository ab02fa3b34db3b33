"""What a request wants continued: the prompt as the router takes it, and checked requests."""

from __future__ import annotations

import hashlib

import msgspec

from frontend.errors import bad_request
from frontend.http.json_body import JsonObject
from frontend.request_schema.sampling import Common
from transport.framing import Payload, token_frame
from transport.messages.generate import PromptKind

AFFINITY_CHARACTERS = 1024
"""How much of a text's beginning tells its conversation."""
AFFINITY_TOKENS = 256


class Prompt(msgspec.Struct, frozen=True):
    """One prompt, as `Submit` and `Encode` carry it."""

    kind: PromptKind
    frame: Payload
    affinity: str = ""
    add_special_tokens: bool = True
    echo: str | list[int] | None = None
    """What a completion with `echo` repeats: the text, or ids to decode."""


class GenerationRequest(msgspec.Struct, frozen=True):
    """A checked request to generate."""

    common: Common
    prompts: list[Prompt]
    echo: bool = False


def chat_prompt(
    messages: list[JsonObject],
    tools: list[JsonObject] | None,
    template_kwargs: JsonObject,
    beginning: str,
) -> Prompt:
    """A conversation to be rendered. `beginning` tells which conversation it is.

    Raises:
        ApiError: 400, it cannot be passed on.
    """
    payload = {"messages": messages, "tools": tools, "template_kwargs": template_kwargs}
    try:
        frame = msgspec.json.encode(payload)
    except (msgspec.MsgspecError, OverflowError, RecursionError) as error:
        raise bad_request(f"messages or tools cannot be passed on: {error}.", "messages") from error
    return Prompt("chat", frame, _digest(beginning.encode()))


def text_prompt(text: str, add_special_tokens: bool, echo: bool = False) -> Prompt:
    beginning = text[:AFFINITY_CHARACTERS].encode()
    return Prompt(
        "text", text.encode(), _digest(beginning), add_special_tokens, text if echo else None
    )


def token_prompt(ids: list[int], echo: bool = False) -> Prompt:
    frame = token_frame(ids)
    return Prompt(
        "tokens",
        frame,
        _digest(token_frame(ids[:AFFINITY_TOKENS])),
        echo=ids if echo else None,
    )


def _digest(data: bytes | memoryview) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
