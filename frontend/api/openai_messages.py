"""Messages and tools as OpenAI's clients write them, and what they are in a `Conversation`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from frontend.conversation import Message, ToolCall
from frontend.errors import bad_request
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


def normalize_messages(messages: list[AnyMessage]) -> list[Message]:
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


def offered_tools(
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
