"""The answer of `/v1/completions`: `text_completion`, whole and in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from frontend.api.dialect import AnswerHead
from frontend.api.openai_answer import OpenAIWriter
from frontend.generation.collected import CollectedChoice
from frontend.generation.deltas import Delta, Finish, Reasoning, Text, ToolCall
from frontend.generation.logprobs import TokenLogprob
from frontend.generation.request import GenerationRequest
from frontend.generation.text_decoding import TokenTexts
from frontend.generation.usage import Usage
from frontend.http.json_body import JsonObject


class CompletionWriter(OpenAIWriter):
    """A completion is nothing but text: reasoning is a part of it, and calls have no place in it."""

    answer_kind = "text_completion"
    event_kind = "text_completion"

    def __init__(
        self,
        head: AnswerHead,
        request: GenerationRequest,
        texts: TokenTexts,
        usage: Callable[[], Usage],
    ) -> None:
        super().__init__(head, request, texts, usage)
        self._echoes: list[str] = []
        """The text to repeat before each choice's own; empty: nothing is repeated."""
        for prompt in request.prompts:
            if prompt.echo is not None:
                text = prompt.echo if isinstance(prompt.echo, str) else texts.decode(prompt.echo)
                self._echoes.extend([text] * request.n)

    def _opening(self, number: int) -> JsonObject | None:
        return _choice(number, self._echoes[number]) if self._echoes else None

    def _piece(self, number: int, delta: Delta) -> JsonObject | None:
        match delta:
            case Text(text, logprob, start) | Reasoning(text, logprob, start):
                entry = None if logprob is None else self._logprobs([logprob], [start])
                return _choice(number, text, entry)
            case ToolCall():
                return None
            case Finish(reason):
                return _choice(number, "", None, _finish_reason(reason))
            case _:
                assert_never(delta)

    def _whole(self, number: int, choice: CollectedChoice) -> JsonObject:
        logprobs = None
        if self._with_logprobs:
            logprobs = self._logprobs(choice.logprobs, choice.starts)
        text = choice.reasoning + choice.text
        if self._echoes:
            text = self._echoes[number] + text
        return _choice(number, text, logprobs, _finish_reason(choice.finish_reason))

    def _logprobs(self, logprobs: list[TokenLogprob], starts: list[int]) -> JsonObject:
        return {
            "tokens": [self._token(entry.token_id) for entry in logprobs],
            "token_logprobs": [entry.logprob for entry in logprobs],
            # Should two tokens have the same text, the more likely one stays.
            "top_logprobs": [
                {self._token(token_id): value for token_id, value in reversed(entry.top)}
                for entry in logprobs
            ],
            "text_offset": starts,
        }

    def _token(self, token_id: int) -> str:
        """A token as completions name it: its text, or `bytes:\\xe2\\x80` where it is no whole one;
        as U+FFFD all of those would be one key."""
        raw = self._texts.token_bytes(token_id)
        try:
            raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return self._texts.token_text(token_id)


def _choice(
    number: int, text: str, logprobs: JsonObject | None = None, reason: str | None = None
) -> JsonObject:
    return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _finish_reason(reason: str) -> str:
    """Completions know no tool calls."""
    return "stop" if reason == "tool_calls" else reason
