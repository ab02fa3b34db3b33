"""The bodies of `/tokenize` and `/detokenize`."""

from __future__ import annotations

import msgspec

from frontend.api.openai_chat import ConversationBody, Messages
from frontend.api.sampling import TokenId, check_ids, check_model
from frontend.errors import bad_request
from frontend.generation.request import ModelLimits, Prompt, chat_prompt, text_prompt
from frontend.http.json_body import decode_body


class TokenizeBody(ConversationBody, frozen=True, kw_only=True):
    """A chat's body, or a text in place of the messages. What concerns the answer is checked and has no
    effect."""

    messages: Messages | None = None
    prompt: str | None = None
    content: str | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True):
    tokens: list[TokenId]
    model: str | None = None


_TOKENIZE = msgspec.json.Decoder(TokenizeBody)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)


def read_tokenize(body: bytes, limits: ModelLimits) -> Prompt:
    """What to encode: `prompt` or `content` (a string), or `messages` (a conversation).

    Raises:
        ApiError: 400 or 404, naming the field.
    """
    asked = decode_body(body, _TOKENIZE)
    check_model(asked.model, limits)
    texts = [text for text in (asked.prompt, asked.content) if text is not None]
    if len(texts) + (asked.messages is not None) != 1:
        raise bad_request("Give one of prompt, content and messages.", "prompt")
    if asked.messages is not None:
        return chat_prompt(asked.conversation(asked.messages))
    return text_prompt(texts[0], asked.add_special_tokens is not False)


def read_detokenize(body: bytes, limits: ModelLimits) -> list[int]:
    """The ids to decode.

    Raises:
        ApiError: 400 or 404, naming the field.
    """
    asked = decode_body(body, _DETOKENIZE)
    check_model(asked.model, limits)
    check_ids(asked.tokens, "tokens", limits)
    return asked.tokens
