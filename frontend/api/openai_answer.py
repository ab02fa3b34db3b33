"""What OpenAI's answers to chats and to completions have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import msgspec

from frontend.api.dialect import AnswerHead
from frontend.errors import ApiError
from frontend.generation.collected import CollectedChoice
from frontend.generation.deltas import Delta, Text
from frontend.generation.request import GenerationRequest
from frontend.generation.text_decoding import TokenTexts
from frontend.generation.usage import Usage
from frontend.http.json_body import JsonObject
from frontend.http.sse import DONE, EventTemplate, event


class OpenAIWriter(ABC):
    """An answer (`AnswerWriter`) whose objects differ only in what lies in `choices`."""

    answer_kind: str
    event_kind: str

    def __init__(
        self,
        head: AnswerHead,
        request: GenerationRequest,
        texts: TokenTexts,
        usage: Callable[[], Usage],
    ) -> None:
        self._head = head
        self._texts = texts
        self._usage = usage
        self._with_logprobs = request.wants_logprobs
        self._include_usage = request.include_usage
        self._continuous_usage = request.continuous_usage
        self._fills: dict[int, Callable[[str], bytes] | None] = {}
        """Of each choice that has begun, what makes the event of a text without logprobs."""

    @abstractmethod
    def _opening(self, number: int) -> JsonObject | None:
        """What a choice's first event holds before any delta."""

    @abstractmethod
    def _piece(self, number: int, delta: Delta) -> JsonObject | None:
        """What an event holds of a choice; None: the delta has no event."""

    @abstractmethod
    def _whole(self, number: int, choice: CollectedChoice) -> JsonObject: ...

    def events(self, number: int, delta: Delta) -> bytes:
        fill = self._fills.get(number)
        if fill is not None and type(delta) is Text and delta.logprob is None:
            return fill(delta.text)
        opening = b"" if number in self._fills else self._begin(number)
        return opening + self._event(self._piece(number, delta))

    def end(self) -> bytes:
        if not self._include_usage:
            return DONE
        return event(self._object([], self._usage())) + DONE

    def failure(self, error: ApiError) -> bytes:
        return event(error.value()) + DONE

    def answer(self, choices: list[CollectedChoice]) -> bytes:
        listed = [self._whole(number, choice) for number, choice in enumerate(choices)]
        head = self._head_of(self.answer_kind)
        return msgspec.json.encode(
            {**head, "choices": listed, "usage": usage_object(self._usage())}
        )

    def _begin(self, number: int) -> bytes:
        self._fills[number] = None
        if not self._continuous_usage:
            piece = self._piece(number, Text(EventTemplate.MARK))
            self._fills[number] = EventTemplate(self._object([piece], None)).fill
        return self._event(self._opening(number))

    def _event(self, choice: JsonObject | None) -> bytes:
        if choice is None:
            return b""
        usage = self._usage() if self._continuous_usage else None
        return event(self._object([choice], usage))

    def _object(self, choices: list[JsonObject | None], usage: Usage | None) -> JsonObject:
        """An event's object; `usage` is null where the client asked for it at the end only."""
        value = {**self._head_of(self.event_kind), "choices": choices}
        if usage is not None:
            value["usage"] = usage_object(usage)
        elif self._include_usage:
            value["usage"] = None
        return value

    def _head_of(self, kind: str) -> JsonObject:
        head = self._head
        return {"id": head.id, "object": kind, "created": head.created, "model": head.model}


def usage_object(usage: Usage) -> JsonObject:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
