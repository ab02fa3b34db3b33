"""Messages as the dicts that chat templates read, in the form that the template at hand expects.

Templates ask whether a key is there, so what a message does not have is left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import cast

from frontend.conversation import Message, ToolCall
from frontend.tokenizer.control_tokens import Json


@dataclass(frozen=True)
class MessageStyle:
    """What a template expects where templates differ."""

    arguments_as_text: bool = False
    """Tool call arguments as JSON text instead of an object."""
    null_content: bool = True
    """Null instead of "" as the content beside tool calls."""
    wrap_text_arguments: bool = False
    """Arguments that are no JSON object as `{"arguments": <the text>}` instead of as they are."""

    def apply(self, messages: list[Message]) -> list[Json]:
        return [self._message(message) for message in messages]

    def _message(self, message: Message) -> Json:
        is_null = not message.content and bool(message.tool_calls) and self.null_content
        result: dict[str, Json] = {"role": message.role}
        if message.tool_call_id is not None:
            result["tool_call_id"] = message.tool_call_id
        result["content"] = None if is_null else message.content
        if message.name is not None:
            result["name"] = message.name
        if message.reasoning is not None:
            result["reasoning_content"] = message.reasoning
        if message.tool_calls:
            result["tool_calls"] = [self._call(call) for call in message.tool_calls]
        return result

    def _call(self, call: ToolCall) -> Json:
        arguments = cast("Json", call.arguments)
        if isinstance(arguments, str) and self.wrap_text_arguments:
            arguments = {"arguments": arguments}
        if isinstance(arguments, dict) and self.arguments_as_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
        function: Json = {"name": call.name, "arguments": arguments}
        return {"id": call.id, "type": "function", "function": function}


def has_text_arguments(messages: list[Message]) -> bool:
    return any(isinstance(call.arguments, str) for m in messages for call in m.tool_calls)
