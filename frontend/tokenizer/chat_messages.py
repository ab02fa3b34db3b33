"""Bring OpenAI-style messages into the form that chat templates understand.

* Role `developer` becomes `system`.
* A list of text parts becomes one string, the parts joined without anything between them.
* Keys with the value null are dropped, and so is an empty `tool_calls`: templates ask whether a key
  is there.
* Content that is missing, null or empty beside tool calls becomes null or "", as the template wants.
* Tool call arguments become an object or JSON text, as the template wants. Clients send back what a
  model once wrote, so anything is accepted there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from frontend.tokenizer.control_tokens import Json
from frontend.tokenizer.errors import PromptError


@dataclass(frozen=True)
class MessageStyle:
    """What a template expects where templates differ."""

    arguments_as_text: bool = False
    """Tool call arguments as JSON text instead of an object."""
    null_content: bool = True
    """Null instead of "" as the content beside tool calls."""


def normalize_messages(
    messages: list[Json], style: MessageStyle, *, wrap_odd_arguments: bool = False
) -> tuple[list[Json], bool]:
    """Return new messages, and whether some tool call has arguments that are no JSON object.

    Such arguments are passed on as text, or, with `wrap_odd_arguments`, as
    `{"arguments": <the text>}`, for templates that need an object.

    Raises:
        PromptError: a message is not an object with a role, or has content of an unknown form.
    """
    rewriter = _Rewriter(style, wrap_odd_arguments)
    return [rewriter.message(i, message) for i, message in enumerate(messages)], rewriter.odd


class _Rewriter:
    def __init__(self, style: MessageStyle, wrap_odd: bool) -> None:
        self._style = style
        self._wrap_odd = wrap_odd
        self.odd = False

    def message(self, index: int, message: Json) -> Json:
        where = f"messages[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise PromptError(f"{where} is not an object with a role.", where)
        result: dict[str, Json] = {k: v for k, v in message.items() if v is not None}
        if result["role"] == "developer":
            result["role"] = "system"
        calls = result.pop("tool_calls", None)
        if calls:
            result["tool_calls"] = self._calls(calls, f"{where}.tool_calls")
        content = _joined(message.get("content"), f"{where}.content")
        refusal = message.get("refusal")
        if content == "" and isinstance(refusal, str):
            content = refusal
        absent = content == "" and bool(calls) and self._style.null_content
        result["content"] = None if absent else content
        return result

    def _calls(self, calls: Json, where: str) -> list[Json]:
        if not isinstance(calls, list):
            raise PromptError(f"{where} is not a list.", where)
        result: list[Json] = []
        for index, call in enumerate(calls):
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(call, dict) or not isinstance(function, dict):
                raise PromptError(
                    f"{where}[{index}] is not an object with a function.", f"{where}[{index}]"
                )
            arguments = self._arguments(function.get("arguments"))
            result.append({**call, "function": {**function, "arguments": arguments}})
        return result

    def _arguments(self, given: Json) -> Json:
        value: Json = _parsed(given) if isinstance(given, str) else given
        if value is None:
            value = {}
        if isinstance(value, dict):
            return json.dumps(value, ensure_ascii=False) if self._style.arguments_as_text else value
        self.odd = True
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        if not self._wrap_odd:
            return text
        wrapped: Json = {"arguments": text}
        return json.dumps(wrapped, ensure_ascii=False) if self._style.arguments_as_text else wrapped


def _parsed(text: str) -> Json:
    """The JSON value; None also for blank text, and the text itself if it is not JSON."""
    if not text.strip():
        return None
    try:
        value: Json = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value


def _joined(content: Json, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise PromptError(f"{where} is neither text nor a list of text parts.", where)
    texts: list[str] = []
    for index, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(text, str):
            raise PromptError(
                f"{where}[{index}] is not a text part, and this model reads text only.",
                f"{where}[{index}]",
            )
        texts.append(text)
    return "".join(texts)
