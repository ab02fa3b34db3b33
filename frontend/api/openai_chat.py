"""The body of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from frontend.api.openai_messages import AnyMessage, ToolChoice, normalize_messages, offered_tools
from frontend.api.sampling import GenerationBody, TopLogprobs
from frontend.conversation import Conversation
from frontend.errors import bad_request
from frontend.generation.request import GenerationRequest, ModelLimits, chat_prompt
from frontend.http.json_body import decode_body

Messages = Annotated[list[AnyMessage], Meta(min_length=1)]

RESERVED_KWARGS = frozenset(
    {
        "chat_template",
        "conversations",
        "documents",
        "messages",
        "raise_exception",
        "return_assistant_tokens_mask",
        "self",
        "strftime_now",
        "tokenize",
        "tools",
    }
)
"""Arguments of the template, or of who calls it, that are not the client's to set."""


class ConversationBody(GenerationBody, frozen=True, kw_only=True):
    """All that a chat's prompt is made of, but the messages."""

    tools: Annotated[list[dict[str, object]], Meta(max_length=1024)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[None, Meta(description="absent: use tools")] = None
    function_call: Annotated[None, Meta(description="absent: use tool_choice")] = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    """May hold the three fields before it too, as with other servers; then they count."""

    def conversation(self, messages: list[AnyMessage]) -> Conversation:
        """
        Raises:
            ApiError: 400, naming the field.
        """
        kwargs = dict(self.chat_template_kwargs or {})
        for name in RESERVED_KWARGS.intersection(kwargs):
            raise bad_request(f"chat_template_kwargs must not set {name}.", "chat_template_kwargs")
        opens = _take_switch(kwargs, "add_generation_prompt", self.add_generation_prompt)
        continues = _take_switch(kwargs, "continue_final_message", self.continue_final_message)
        if opens and continues:
            raise bad_request(
                "The request asks both for a new turn (add_generation_prompt) and for the last one "
                "to go on (continue_final_message): choose one.",
                "chat_template_kwargs" if self.chat_template_kwargs else "continue_final_message",
            )
        return Conversation(
            messages=normalize_messages(messages),
            tools=offered_tools(self.tools or [], self.tool_choice or "auto"),
            reasoning_effort=None if "reasoning_effort" in kwargs else self.reasoning_effort,
            template_kwargs=kwargs,
            add_generation_prompt=opens is not False and not continues,
            continue_final_message=continues or False,
        )


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
        """
        Raises:
            ApiError: 400 or 404, naming the field.
        """
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs is only allowed with logprobs: true.", "top_logprobs")
        logprobs = (self.top_logprobs or 0) if self.logprobs else -1
        prompts = [chat_prompt(self.conversation(self.messages))]
        return self.generation(prompts, limits, limits.max_model_len, logprobs)


def _take_switch(kwargs: dict[str, object], name: str, field: bool | None) -> bool | None:
    """Take an argument out of `kwargs`; where it is not there, the body's own field counts."""
    value = kwargs.pop(name, None)
    if value is None:
        return field
    if not isinstance(value, bool):
        raise bad_request(
            f"chat_template_kwargs.{name} must be true or false.", "chat_template_kwargs"
        )
    return value


_DECODER = msgspec.json.Decoder(ChatBody)


def read_chat(body: bytes, limits: ModelLimits) -> GenerationRequest:
    """
    Raises:
        ApiError: 400 or 404, naming the field.
    """
    return decode_body(body, _DECODER).to_generation(limits)
