"""Prompts that cannot fit into the context, whatever the tokenizer makes of them: they are refused
before they travel."""

from __future__ import annotations

import msgspec

from frontend.conversation import Conversation, Message
from frontend.errors import ApiError, bad_request
from frontend.generation.request import ModelLimits


def check_length(count: int, param: str, limits: ModelLimits, unit: str = "tokens") -> None:
    """
    Raises:
        ApiError: 400, `count` tokens (or other units, each of at least a token) do not fit.
    """
    if count > limits.max_model_len:
        raise _too_long(f"{param} has {count} {unit}", param, limits)


def check_text(size: int, param: str, limits: ModelLimits) -> None:
    """
    Raises:
        ApiError: 400, a text of `size` bytes does not fit.
    """
    if limits.max_token_bytes is not None and size > limits.max_model_len * limits.max_token_bytes:
        raise _too_long(
            f"{param} has {size} bytes, of which a token holds {limits.max_token_bytes} at most",
            param,
            limits,
        )


def check_conversation(conversation: Conversation, size: int, limits: ModelLimits) -> None:
    """`size`: bytes of the conversation as JSON, which are more than those of its texts.

    Raises:
        ApiError: 400, the texts of messages and tools do not fit.
    """
    if limits.max_token_bytes is None or size <= limits.max_model_len * limits.max_token_bytes:
        return
    texts = sum(map(_text_bytes, conversation.messages))
    tools = len(msgspec.json.encode(conversation.tools)) if conversation.tools else 0
    check_text(texts + tools, "messages", limits)


def _text_bytes(message: Message) -> int:
    size = len(message.content.encode()) + len((message.reasoning or "").encode())
    for call in message.tool_calls:
        given = call.arguments
        size += len(given.encode() if isinstance(given, str) else msgspec.json.encode(given))
    return size


def _too_long(found: str, param: str, limits: ModelLimits) -> ApiError:
    return bad_request(
        f"{found}: that is more than the model's maximum context length of "
        f"{limits.max_model_len} tokens.",
        param,
        "context_length_exceeded",
    )
