"""`/v1/completions`: the body, and the answer, which is a `text_completion`, whole or in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, assert_never

import msgspec
from msgspec import Meta

from frontend.api.dialect import AnswerHead, Dialect
from frontend.api.openai_answer import OpenAIWriter
from frontend.api.prompt_bounds import check_length, check_text
from frontend.api.sampling import (
    MAX_SEQUENCES,
    GenerationBody,
    TokenId,
    TopLogprobs,
    check_ids,
)
from frontend.errors import bad_request
from frontend.generation.collected import CollectedChoice
from frontend.generation.deltas import Delta, Finish, Reasoning, Text, ToolCall
from frontend.generation.request import (
    GenerationRequest,
    ModelLimits,
    Prompt,
    text_prompt,
    token_prompt,
)
from frontend.generation.text_decoding import TokenTexts
from frontend.generation.usage import Usage
from frontend.http.json_body import JsonObject, decode_body
from frontend.links.body_reader import body_form
from transport.logprobs import TokenLogprob

DEFAULT_TOKENS = 16
"""`max_tokens` where it is not given, as the API has it."""
PROMPT_WORDS = "a string, an array of strings, an array of token ids or an array of those"

TokenIds = Annotated[list[TokenId], Meta(min_length=1)]


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    prompt: Annotated[
        str | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1)],
        Meta(description=PROMPT_WORDS),
    ]
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    best_of: Annotated[int, Meta(ge=1)] | None = None
    suffix: (
        Annotated[str, Meta(max_length=0, description="absent: the model cannot fill a gap")] | None
    ) = None

    def to_generation(self, limits: ModelLimits) -> GenerationRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise bad_request("best_of is only supported where it equals n.", "best_of")
        if self.echo and self.logprobs is not None:
            raise bad_request("echo is not supported together with logprobs.", "echo")
        logprobs = -1 if self.logprobs is None else self.logprobs
        return self.generation(self._prompts(limits), limits, DEFAULT_TOKENS, logprobs)

    def _prompts(self, limits: ModelLimits) -> list[Prompt]:
        if isinstance(self.prompt, str):
            return [self._text(self.prompt, "prompt", limits)]
        if isinstance(self.prompt[0], int):
            check_length(len(self.prompt), "prompt", limits)
        elif len(self.prompt) > MAX_SEQUENCES:
            raise bad_request(
                f"prompt must be an array of at most {MAX_SEQUENCES} prompts.", "prompt"
            )
        ids = [token for token in self.prompt if isinstance(token, int)]
        if len(ids) == len(self.prompt):
            return [self._tokens(ids, "prompt", limits)]
        if ids:
            raise bad_request(f"prompt must be {PROMPT_WORDS}.", "prompt")
        return [
            self._tokens(prompt, f"prompt[{position}]", limits)
            if isinstance(prompt, list)
            else self._text(str(prompt), f"prompt[{position}]", limits)
            for position, prompt in enumerate(self.prompt)
        ]

    def _text(self, text: str, path: str, limits: ModelLimits) -> Prompt:
        prompt = text_prompt(text, self.add_special_tokens is not False, self.echo or False)
        check_text(len(prompt.frame), path, limits)
        return prompt

    def _tokens(self, ids: list[int], path: str, limits: ModelLimits) -> Prompt:
        check_length(len(ids), path, limits)
        check_ids(ids, path, limits)
        return token_prompt(ids, self.echo or False)


_DECODER = msgspec.json.Decoder(CompletionBody)


def read_completion(body: bytes, limits: ModelLimits) -> GenerationRequest:
    """
    Raises:
        ApiError: 400 or 404, naming the field.
    """
    return decode_body(body, _DECODER).to_generation(limits)


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
    return "stop" if reason == "tool_calls" else reason


COMPLETIONS = Dialect(
    "cmpl-", body_form("completion", read_completion, GenerationRequest), CompletionWriter
)
