"""A chat in the one form that endpoints make of a client's messages and that the tokenizer renders."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call that the model made in an earlier turn."""

    id: str
    name: str
    arguments: dict[str, object] | str = {}
    """Text where the model did not write a JSON object."""


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn. Only turns of the assistant have reasoning and calls; only those of a tool have a call
    id, which is that of the call they answer."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    name: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None


class Conversation(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a prompt is rendered from. `Submit` and `Encode` carry it as JSON."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    tools: list[dict[str, object]] = []
    """As the client wrote them: templates print them whole."""
    reasoning_effort: str | None = None
    template_kwargs: dict[str, object] = {}
    """Further arguments of the template, by name."""
    add_generation_prompt: bool = True
    """Whether the prompt opens a new turn of the assistant."""
    continue_final_message: bool = False
    """Whether the model goes on with the last message. Then no turn is opened."""

    def beginning(self) -> str:
        """What the conversation began with; the same for all its turns."""
        return next(
            (m.content for m in self.messages if m.role == "user"), self.messages[0].content
        )
