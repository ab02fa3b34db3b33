"""Answers of chat and of completions, whole and as events."""

from __future__ import annotations

from typing import Protocol

import msgspec

from frontend.generation.logprobs_format import TokenLogprob, chat_entry, completion_logprobs
from frontend.generation.text_decoding import TokenTexts
from frontend.generation.usage import Usage
from frontend.http.json_body import JsonObject
from frontend.http.sse import EventTemplate, event


class ReplyHead(msgspec.Struct, frozen=True):
    """What all parts of one answer have in common."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str

    def as_json(self, kind: str) -> JsonObject:
        """The fields that open every object of kind `kind`."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class WholeChoice:
    """A choice that is being collected."""

    __slots__ = ("finish_reason", "logprobs", "offsets", "parts")

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.offsets: list[int] = []
        self.finish_reason = "stop"


class ReplyFormat(Protocol):
    """One of the two ways to write an answer."""

    def opening(self, number: int, usage: Usage | None) -> bytes:
        """Events that come before the first token of a choice."""
        ...

    def template(self, number: int) -> EventTemplate:
        """The event of a token without logprobs and usage."""
        ...

    def token(
        self,
        number: int,
        text: str,
        logprob: TokenLogprob | None,
        offset: int,
        usage: Usage | None,
    ) -> bytes:
        """The event of a token; `offset` is where its text starts in the choice's text."""
        ...

    def finish(self, number: int, reason: str, usage: Usage | None) -> bytes: ...

    def usage(self, usage: Usage) -> bytes: ...

    def whole(self, choices: list[WholeChoice], usage: Usage) -> bytes: ...


class _Events:
    """The frame around the choices of an event."""

    def __init__(self, head: ReplyHead, kind: str, with_usage: bool) -> None:
        self._head = head.as_json(kind)
        self._with_usage = with_usage

    def value(self, choices: list[JsonObject], usage: Usage | None) -> JsonObject:
        """The event's object; `usage` is null where the client asked for it at the end only."""
        value = {**self._head, "choices": choices}
        if usage is not None:
            value["usage"] = usage.as_json()
        elif self._with_usage:
            value["usage"] = None
        return value


class ChatFormat:
    """`chat.completion` and its chunks."""

    def __init__(
        self, head: ReplyHead, texts: TokenTexts, with_usage: bool, with_logprobs: bool
    ) -> None:
        self._head = head
        self._texts = texts
        self._with_logprobs = with_logprobs
        self._events = _Events(head, "chat.completion.chunk", with_usage)

    def _chunk(
        self,
        number: int,
        delta: JsonObject,
        usage: Usage | None,
        logprobs: JsonObject | None = None,
        reason: str | None = None,
    ) -> JsonObject:
        choice: JsonObject = {
            "index": number,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": reason,
        }
        return self._events.value([choice], usage)

    def opening(self, number: int, usage: Usage | None) -> bytes:
        return event(self._chunk(number, {"role": "assistant", "content": ""}, usage))

    def template(self, number: int) -> EventTemplate:
        return EventTemplate(self._chunk(number, {"content": EventTemplate.MARK}, None))

    def token(
        self,
        number: int,
        text: str,
        logprob: TokenLogprob | None,
        offset: int,
        usage: Usage | None,
    ) -> bytes:
        logprobs = None if logprob is None else self._logprobs([logprob])
        return event(self._chunk(number, {"content": text}, usage, logprobs))

    def finish(self, number: int, reason: str, usage: Usage | None) -> bytes:
        return event(self._chunk(number, {}, usage, reason=reason))

    def usage(self, usage: Usage) -> bytes:
        return event(self._events.value([], usage))

    def _logprobs(self, logprobs: list[TokenLogprob]) -> JsonObject:
        return {"content": [chat_entry(self._texts, entry) for entry in logprobs], "refusal": None}

    def whole(self, choices: list[WholeChoice], usage: Usage) -> bytes:
        listed = [
            {
                "index": number,
                "message": {"role": "assistant", "content": "".join(choice.parts), "refusal": None},
                "logprobs": self._logprobs(choice.logprobs) if self._with_logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            for number, choice in enumerate(choices)
        ]
        value = {**self._head.as_json("chat.completion"), "choices": listed}
        return msgspec.json.encode({**value, "usage": usage.as_json()})


class CompletionFormat:
    """`text_completion`, whole and in chunks."""

    def __init__(
        self,
        head: ReplyHead,
        texts: TokenTexts,
        with_usage: bool,
        with_logprobs: bool,
        echoes: list[str],
    ) -> None:
        """`echoes` has the text to repeat before each choice's own, or is empty."""
        self._head = head
        self._texts = texts
        self._with_logprobs = with_logprobs
        self._echoes = echoes
        self._events = _Events(head, "text_completion", with_usage)

    def _chunk(
        self,
        number: int,
        text: str,
        usage: Usage | None,
        logprobs: JsonObject | None = None,
        reason: str | None = None,
    ) -> JsonObject:
        return self._events.value([self._choice(number, text, logprobs, reason)], usage)

    def _choice(
        self, number: int, text: str, logprobs: JsonObject | None, reason: str | None
    ) -> JsonObject:
        return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def opening(self, number: int, usage: Usage | None) -> bytes:
        if not self._echoes:
            return b""
        return event(self._chunk(number, self._echoes[number], usage))

    def template(self, number: int) -> EventTemplate:
        return EventTemplate(self._chunk(number, EventTemplate.MARK, None))

    def token(
        self,
        number: int,
        text: str,
        logprob: TokenLogprob | None,
        offset: int,
        usage: Usage | None,
    ) -> bytes:
        logprobs = None
        if logprob is not None:
            logprobs = completion_logprobs(self._texts, [logprob], [offset])
        return event(self._chunk(number, text, usage, logprobs))

    def finish(self, number: int, reason: str, usage: Usage | None) -> bytes:
        return event(self._chunk(number, "", usage, reason=reason))

    def usage(self, usage: Usage) -> bytes:
        return event(self._events.value([], usage))

    def whole(self, choices: list[WholeChoice], usage: Usage) -> bytes:
        listed = [
            self._choice(
                number,
                (self._echoes[number] if self._echoes else "") + "".join(choice.parts),
                completion_logprobs(self._texts, choice.logprobs, choice.offsets)
                if self._with_logprobs
                else None,
                choice.finish_reason,
            )
            for number, choice in enumerate(choices)
        ]
        value = {**self._head.as_json("text_completion"), "choices": listed}
        return msgspec.json.encode({**value, "usage": usage.as_json()})
