"""The body of `/v1/completions`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from frontend.api.sampling import GenerationBody, TokenId, TopLogprobs, check_ids
from frontend.errors import bad_request
from frontend.generation.request import (
    GenerationRequest,
    ModelLimits,
    Prompt,
    text_prompt,
    token_prompt,
)
from frontend.http.json_body import decode_body

MAX_PROMPTS = 256
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
        """
        Raises:
            ApiError: 400 or 404, naming the field.
        """
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise bad_request("best_of is only supported where it equals n.", "best_of")
        if self.echo and self.logprobs is not None:
            raise bad_request("echo is not supported together with logprobs.", "echo")
        logprobs = -1 if self.logprobs is None else self.logprobs
        return self.generation(self._prompts(limits), limits, DEFAULT_TOKENS, logprobs)

    def _prompts(self, limits: ModelLimits) -> list[Prompt]:
        if isinstance(self.prompt, str):
            return [self._text(self.prompt)]
        ids = [token for token in self.prompt if isinstance(token, int)]
        if len(ids) == len(self.prompt):
            return [self._tokens(ids, "prompt", limits)]
        if ids:
            raise bad_request(f"prompt must be {PROMPT_WORDS}.", "prompt")
        if len(self.prompt) > MAX_PROMPTS:
            raise bad_request(
                f"prompt must be an array of at most {MAX_PROMPTS} prompts.", "prompt"
            )
        return [
            self._tokens(prompt, f"prompt[{position}]", limits)
            if isinstance(prompt, list)
            else self._text(str(prompt))
            for position, prompt in enumerate(self.prompt)
        ]

    def _text(self, text: str) -> Prompt:
        return text_prompt(text, self.add_special_tokens is not False, self.echo or False)

    def _tokens(self, ids: list[int], path: str, limits: ModelLimits) -> Prompt:
        check_ids(ids, path, limits)
        return token_prompt(ids, self.echo or False)


_DECODER = msgspec.json.Decoder(CompletionBody)


def read_completion(body: bytes, limits: ModelLimits) -> GenerationRequest:
    """
    Raises:
        ApiError: 400 or 404, naming the field.
    """
    return decode_body(body, _DECODER).to_generation(limits)
