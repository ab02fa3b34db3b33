"""Check the messages of a chat and bring them into the one form that templates are given.

The form: every message has a `role` out of system, user, assistant and tool, and a `content` string;
an assistant message may have `tool_calls`, whose arguments are objects where the client's are one.
"""

from __future__ import annotations

import msgspec

from frontend.errors import bad_request
from frontend.http.json_body import JsonObject
from frontend.request_schema.fields import Fields, as_object

ROLES = {"system": "system", "developer": "system", "user": "user"}
"""Roles that carry only content, and what the template calls them."""


def read_messages(fields: Fields) -> list[JsonObject]:
    """The conversation, checked and normalised.

    Raises:
        ApiError: 400, naming `messages[i]` and the field.
    """
    values = fields.array("messages")
    if not values:
        raise fields.refuse("messages", "a non-empty array")
    messages: list[JsonObject] = []
    open_calls: set[str] | None = None
    for position, value in enumerate(values):
        message = as_object(value, fields.path(f"messages[{position}]"))
        role = message.raw("role")
        if role == "tool":
            messages.append(_read_tool_result(message, open_calls))
            continue
        if role == "assistant":
            read, calls = _read_assistant(message)
            messages.append(read)
            open_calls = calls or None
            continue
        if not isinstance(role, str) or role not in ROLES:
            raise message.refuse("role", "system, developer, user, assistant or tool")
        messages.append(_with_name(message, {"role": ROLES[role], "content": _content(message)}))
        open_calls = None
    return messages


def first_user_text(messages: list[JsonObject]) -> str:
    """What the conversation began with; the same for all its turns."""
    for message in messages:
        if message["role"] == "user":
            return str(message["content"])
    return str(messages[0]["content"])


def _with_name(message: Fields, read: JsonObject) -> JsonObject:
    name = message.string("name")
    if name is not None:
        read["name"] = name
    return read


def _content(message: Fields, default: str | None = None) -> str:
    """The text of `content`: a string, or text parts joined without anything between them."""
    content = message.raw("content")
    if isinstance(content, str):
        return content
    if content is None and default is not None:
        return default
    if not isinstance(content, list):
        raise message.refuse("content", "a string or an array of text parts")
    return "".join(
        _part_text(as_object(part, message.path(f"content[{position}]")))
        for position, part in enumerate(content)
    )


def _part_text(part: Fields) -> str:
    kind = part.raw("type")
    if kind == "refusal" and isinstance(part.raw("refusal"), str):
        return str(part.raw("refusal"))
    if kind not in ("text", "input_text", "output_text"):
        raise part.refuse("type", '"text": the model takes no other parts')
    text = part.raw("text")
    if not isinstance(text, str):
        raise part.refuse("text", "a string")
    return text


def _read_tool_result(message: Fields, open_calls: set[str] | None) -> JsonObject:
    call_id = message.string("tool_call_id")
    if not call_id:
        raise message.refuse("tool_call_id", "the id of a tool call")
    if open_calls is None or call_id not in open_calls:
        raise bad_request(
            f"{message.path('tool_call_id')}: a tool message must follow the assistant message "
            f"whose tool_calls have its id, {call_id[:100]!r}.",
            message.path("tool_call_id"),
        )
    read: JsonObject = {"role": "tool", "tool_call_id": call_id, "content": _content(message)}
    return _with_name(message, read)


def _read_assistant(message: Fields) -> tuple[JsonObject, set[str]]:
    calls = message.array("tool_calls") or []
    refusal = message.string("refusal")
    content = _content(message, default=refusal or "")
    read = _with_name(message, {"role": "assistant", "content": content})
    reasoning = message.string("reasoning_content")
    if reasoning is not None:
        read["reasoning_content"] = reasoning
    if not calls:
        return read, set()
    read_calls = [
        _read_call(as_object(call, message.path(f"tool_calls[{position}]")))
        for position, call in enumerate(calls)
    ]
    read["tool_calls"] = read_calls
    return read, {str(call["id"]) for call in read_calls}


def _read_call(call: Fields) -> JsonObject:
    call_id = call.string("id")
    if not call_id:
        raise call.refuse("id", "a non-empty string")
    if call.raw("type") not in (None, "function"):
        raise call.refuse("type", '"function"')
    function = call.mapping("function")
    if function is None:
        raise call.refuse("function", "an object")
    inner = Fields(function, call.path("function"))
    name = inner.string("name")
    if not name:
        raise inner.refuse("name", "a non-empty string")
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": _read_arguments(inner)},
    }


def _read_arguments(function: Fields) -> JsonObject | str:
    """Arguments as an object where they are one. What the model once wrote badly stays a string: a
    refusal would end the conversation for good, since it comes back with every turn."""
    value = function.raw("arguments")
    if value is None or value == "":
        return {}
    if isinstance(value, dict):
        return value
    if not isinstance(value, str):
        raise function.refuse("arguments", "a string of JSON or an object")
    try:
        decoded: object = msgspec.json.decode(value)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return value
    return decoded if isinstance(decoded, dict) else value
