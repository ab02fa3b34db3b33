"""The part of a body that a chat's prompt is made of, as OpenAI's clients write it, and the `Conversation`
that it becomes."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from frontend.api.prompt_bounds import check_conversation, check_length
from frontend.api.sampling import GenerationBody
from frontend.conversation import Conversation, Message, ToolCall
from frontend.errors import bad_request
from frontend.generation.request import ModelLimits, Prompt, chat_prompt
from frontend.http.refusals import refusal

NonEmpty = Annotated[str, Meta(min_length=1)]
FunctionName = Annotated[
    str,
    Meta(
        pattern=r"\A[a-zA-Z0-9_.:-]{1,256}\Z",
        description="a name of letters, digits, '_', '.', ':' and '-'",
    ),
]


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class InputTextPart(TextPart, frozen=True, tag="input_text"): ...


class OutputTextPart(TextPart, frozen=True, tag="output_text"): ...


class RefusalPart(msgspec.Struct, frozen=True, tag_field="type", tag="refusal"):
    refusal: str


Part = TextPart | InputTextPart | OutputTextPart | RefusalPart
Content = Annotated[str | list[Part], Meta(description="a string or an array of text parts")]


class SystemMessage(msgspec.Struct, frozen=True, tag_field="role", tag="system"):
    content: Content
    name: str | None = None


class DeveloperMessage(SystemMessage, frozen=True, tag="developer"): ...


class UserMessage(SystemMessage, frozen=True, tag="user"): ...


class ToolMessage(msgspec.Struct, frozen=True, tag_field="role", tag="tool"):
    tool_call_id: Annotated[str, Meta(min_length=1, description="the id of a tool call")]
    content: Content
    name: str | None = None


class CalledFunction(msgspec.Struct, frozen=True):
    name: NonEmpty
    arguments: dict[str, object] | str | None = None


class MessageToolCall(msgspec.Struct, frozen=True):
    id: NonEmpty
    function: CalledFunction
    type: Literal["function"] | None = None


class AssistantMessage(msgspec.Struct, frozen=True, tag_field="role", tag="assistant"):
    content: Content | None = None
    refusal: str | None = None
    """Stands for the content where there is none."""
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[MessageToolCall] | None = None


AnyMessage = SystemMessage | DeveloperMessage | UserMessage | ToolMessage | AssistantMessage


class ToolFunction(msgspec.Struct, frozen=True):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    type: Literal["function"]
    function: ToolFunction


class ChosenFunction(msgspec.Struct, frozen=True):
    name: NonEmpty


class NamedToolChoice(msgspec.Struct, frozen=True):
    type: Literal["function"]
    function: ChosenFunction


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedToolChoice,
    Meta(
        description='"none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
    ),
]


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

    def chat_prompt(self, messages: list[AnyMessage], limits: ModelLimits) -> Prompt:
        """
        Raises:
            ApiError: 400, naming the field.
        """
        # A message is a token at least.
        check_length(len(messages), "messages", limits, "messages")
        conversation = self._conversation(messages)
        prompt = chat_prompt(conversation)
        check_conversation(conversation, len(prompt.frame), limits)
        return prompt

    def _conversation(self, messages: list[AnyMessage]) -> Conversation:
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
            messages=_normalize_messages(messages),
            tools=_offered_tools(self.tools or [], self.tool_choice or "auto"),
            reasoning_effort=None if "reasoning_effort" in kwargs else self.reasoning_effort,
            template_kwargs=kwargs,
            add_generation_prompt=opens is not False and not continues,
            continue_final_message=continues or False,
        )


def _take_switch(kwargs: dict[str, object], name: str, field: bool | None) -> bool | None:
    value = kwargs.pop(name, None)
    if value is None:
        return field
    if not isinstance(value, bool):
        raise bad_request(
            f"chat_template_kwargs.{name} must be true or false.", "chat_template_kwargs"
        )
    return value


def _normalize_messages(messages: list[AnyMessage]) -> list[Message]:
    """
    Raises:
        ApiError: 400, a tool's result answers no call of the assistant's last message.
    """
    normalized: list[Message] = []
    open_calls: set[str] = set()
    for position, message in enumerate(messages):
        match message:
            case AssistantMessage():
                made = _assistant(message)
                open_calls = {call.id for call in made.tool_calls}
            case ToolMessage():
                _check_answers(
                    message.tool_call_id, open_calls, f"messages[{position}].tool_call_id"
                )
                made = Message(
                    "tool", _text(message.content), message.name, tool_call_id=message.tool_call_id
                )
            case _:
                role: Literal["user", "system"]
                role = "user" if isinstance(message, UserMessage) else "system"
                made = Message(role, _text(message.content), message.name)
                open_calls = set()
        normalized.append(made)
    return normalized


def _check_answers(call_id: str, open_calls: set[str], param: str) -> None:
    if call_id not in open_calls:
        raise bad_request(
            f"{param}: a tool message must follow the assistant message whose tool_calls have its "
            f"id, {call_id[:100]!r}.",
            param,
        )


def _assistant(message: AssistantMessage) -> Message:
    content = message.refusal if message.content is None else message.content
    return Message(
        "assistant",
        _text(content or ""),
        message.name,
        message.reasoning_content,
        [
            ToolCall(call.id, call.function.name, _arguments(call.function.arguments))
            for call in message.tool_calls or []
        ],
    )


def _text(content: str | list[Part]) -> str:
    """Parts are joined without anything between them."""
    if isinstance(content, str):
        return content
    return "".join(p.refusal if isinstance(p, RefusalPart) else p.text for p in content)


def _arguments(given: dict[str, object] | str | None) -> dict[str, object] | str:
    """As an object where they are one. What the model once wrote badly stays text: a refusal would end
    the conversation for good, since it comes back with every turn."""
    if not isinstance(given, str):
        return given or {}
    try:
        value: object = msgspec.json.decode(given) if given.strip() else None
    except (msgspec.DecodeError, RecursionError):
        return given
    if value is None:
        return {}
    return value if isinstance(value, dict) else given


def _offered_tools(
    tools: list[dict[str, object]], choice: Literal["none", "auto", "required"] | NamedToolChoice
) -> list[dict[str, object]]:
    """The tools to show to the model. Calls are not parsed out of the answer yet, so none can be
    demanded.

    Raises:
        ApiError: 400, naming `tools` or `tool_choice`.
    """
    try:
        checked = msgspec.convert(tools, list[Tool])
    except msgspec.ValidationError as error:
        raise refusal(error, list[Tool], "tools") from error
    if choice == "none":
        return []
    if choice == "auto":
        return tools
    if not tools:
        raise bad_request("tool_choice demands a tool, but tools is empty.", "tool_choice")
    if isinstance(choice, NamedToolChoice):
        wanted = choice.function.name
        if wanted not in {tool.function.name for tool in checked}:
            raise bad_request(
                f"tool_choice names {wanted[:100]!r}, which is not in tools.", "tool_choice"
            )
    raise bad_request(
        'tool_choice that demands a call is not supported yet: use "auto" or "none".', "tool_choice"
    )
