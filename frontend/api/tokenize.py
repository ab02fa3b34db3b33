"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.types import Receive, Scope, Send

from frontend.api.openai_conversation import ConversationBody, Messages
from frontend.api.prompt_bounds import check_length, check_text
from frontend.api.routes_generate import receive_body
from frontend.api.sampling import TokenId, check_ids, check_model
from frontend.errors import bad_request
from frontend.generation.request import ModelLimits, Prompt, text_prompt
from frontend.http.call import call_of
from frontend.http.disconnect import unless_gone
from frontend.http.json_body import decode_body
from frontend.http.reply import send_bytes
from frontend.links.body_reader import body_form
from frontend.services import Services
from transport.framing import TokenArray
from transport.ids import RequestId

IDS_PER_TURN = 16_384


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
        return asked.chat_prompt(asked.messages, limits)
    prompt = text_prompt(texts[0], asked.add_special_tokens is not False)
    check_text(len(prompt.frame), "prompt" if asked.content is None else "content", limits)
    return prompt


def read_detokenize(body: bytes, limits: ModelLimits) -> list[int]:
    """The ids to decode.

    Raises:
        ApiError: 400 or 404, naming the field.
    """
    asked = decode_body(body, _DETOKENIZE)
    check_model(asked.model, limits)
    check_length(len(asked.tokens), "tokens", limits)
    check_ids(asked.tokens, "tokens", limits)
    return asked.tokens


TOKENIZE = body_form("tokenize", read_tokenize, Prompt)
DETOKENIZE = body_form("detokenize", read_detokenize, list[int])


class Tokenize:
    """`POST /tokenize`: a text or a conversation as token ids."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        prompt, limits = await receive_body(scope, receive, self._services, TOKENIZE)
        encoding = self._services.router.encode(RequestId(call_of(scope).id), prompt)
        ids = await unless_gone(receive, encoding)
        tokens = msgspec.Raw(await _json_array(ids))
        answer = {"tokens": tokens, "count": len(ids), "max_model_len": limits.max_model_len}
        await send_bytes(send, 200, msgspec.json.encode(answer))


async def _json_array(ids: TokenArray) -> bytes:
    """A text may have millions of tokens: the event loop goes on in between."""
    pieces: list[bytes] = []
    for start in range(0, len(ids), IDS_PER_TURN):
        pieces.append(msgspec.json.encode(ids[start : start + IDS_PER_TURN].tolist())[1:-1])
        await asyncio.sleep(0)
    return b"[" + b",".join(pieces) + b"]"


class Detokenize:
    """`POST /detokenize`: token ids as text."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ids, _ = await receive_body(scope, receive, self._services, DETOKENIZE)
        text = await asyncio.to_thread(self._services.texts.decode, ids)
        await send_bytes(send, 200, msgspec.json.encode({"prompt": text, "content": text}))
