"""`/v1/chat/completions`: the body, and the answer, which is a `chat.completion` or its chunks."""

from __future__ import annotations

from typing import Annotated, Literal, assert_never

import msgspec
from msgspec import Meta

from frontend.api.dialect import Dialect
from frontend.api.openai_answer import OpenAIWriter
from frontend.api.openai_conversation import ConversationBody, Messages
from frontend.api.sampling import TopLogprobs
from frontend.errors import bad_request
from frontend.generation.collected import CollectedChoice
from frontend.generation.deltas import Delta, Finish, Reasoning, Text, ToolCall
from frontend.generation.request import GenerationRequest, ModelLimits
from frontend.http.json_body import JsonObject, decode_body
from frontend.links.body_reader import body_form
from transport.logprobs import TokenLogprob


class ChatBody(ConversationBody, frozen=True, kw_only=True):
    messages: Messages
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    modalities: (
        Annotated[
            list[Literal["text"]],
            Meta(min_length=1, max_length=1, description='["text"]: the model gives nothing else'),
        ]
        | None
    ) = None
    audio: Annotated[None, Meta(description="absent: the model gives text alone")] = None

    def to_generation(self, limits: ModelLimits) -> GenerationRequest:
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs is only allowed with logprobs: true.", "top_logprobs")
        logprobs = (self.top_logprobs or 0) if self.logprobs else -1
        prompts = [self.chat_prompt(self.messages, limits)]
        return self.generation(prompts, limits, limits.max_model_len, logprobs)


_DECODER = msgspec.json.Decoder(ChatBody)


def read_chat(body: bytes, limits: ModelLimits) -> GenerationRequest:
    """
    Raises:
        ApiError: 400 or 404, naming the field.
    """
    return decode_body(body, _DECODER).to_generation(limits)


class ChatWriter(OpenAIWriter):
    """Reasoning is `reasoning_content`, as vLLM and DeepSeek name it: OpenAI has no word for it."""

    answer_kind = "chat.completion"
    event_kind = "chat.completion.chunk"

    def _opening(self, number: int) -> JsonObject:
        return _chunk(number, {"role": "assistant", "content": ""}, None)

    def _piece(self, number: int, delta: Delta) -> JsonObject:
        match delta:
            case Text(text, logprob):
                return _chunk(number, {"content": text}, self._logprobs_of(logprob))
            case Reasoning(text, logprob):
                return _chunk(number, {"reasoning_content": text}, self._logprobs_of(logprob))
            case ToolCall():
                return _chunk(number, {"tool_calls": [_call_piece(delta)]}, None)
            case Finish(reason):
                return _chunk(number, {}, None, reason)
            case _:
                assert_never(delta)

    def _whole(self, number: int, choice: CollectedChoice) -> JsonObject:
        calls = choice.tool_calls
        message: JsonObject = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [_whole_call(call) for call in calls]
        return {
            "index": number,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs) if self._with_logprobs else None,
            "finish_reason": choice.finish_reason,
        }

    def _logprobs_of(self, logprob: TokenLogprob | None) -> JsonObject | None:
        return None if logprob is None else self._logprobs([logprob])

    def _logprobs(self, logprobs: list[TokenLogprob]) -> JsonObject:
        return {"content": [self._entry(entry) for entry in logprobs], "refusal": None}

    def _entry(self, logprob: TokenLogprob) -> JsonObject:
        entry = self._token(logprob.token_id, logprob.logprob)
        entry["top_logprobs"] = [self._token(*pair) for pair in logprob.top]
        return entry

    def _token(self, token_id: int, value: float) -> JsonObject:
        return {
            "token": self._texts.token_text(token_id),
            "logprob": value,
            "bytes": list(self._texts.token_bytes(token_id)),
        }


def _chunk(
    number: int, delta: JsonObject, logprobs: JsonObject | None, reason: str | None = None
) -> JsonObject:
    return {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _whole_call(call: ToolCall) -> JsonObject:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _call_piece(call: ToolCall) -> JsonObject:
    """A call's beginning names everything; its further pieces say only which call they belong to."""
    if call.id:
        return {"index": call.index, **_whole_call(call)}
    return {"index": call.index, "function": {"arguments": call.arguments}}


CHAT = Dialect("chatcmpl-", body_form("chat", read_chat, GenerationRequest), ChatWriter)
