"""The fields that chat and completions share. `None`: the client did not say, or said null."""

from __future__ import annotations

import random
from typing import Annotated

import msgspec
from msgspec import Meta

from frontend.errors import ApiError, bad_request
from frontend.generation.request import GenerationRequest, ModelLimits, Prompt
from frontend.generation.stop_strings import StopRule
from frontend.settings import MinP, RepetitionPenalty, Temperature, TopK, TopP
from transport.messages.generate import Generate, SamplingParams

MAX_TOP_LOGPROBS = 20
MAX_SEQUENCES = 256
"""Prompts times `n`."""

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Priority = Annotated[int, Meta(ge=-1000, le=1000)]
TokenId = Annotated[int, Meta(ge=0)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
StopString = Annotated[str, Meta(min_length=1, max_length=16_384)]
Bias = Annotated[float, Meta(ge=-100, le=100)]


class StreamOptions(msgspec.Struct, frozen=True):
    """`include_obfuscation` is checked and has no effect."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class TextFormat(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """The only `response_format` that is served; the others are refused by name."""


class JsonObjectFormat(msgspec.Struct, frozen=True, tag_field="type", tag="json_object"): ...


class JsonSchema(msgspec.Struct, frozen=True):
    schema: Annotated[dict[str, object] | bool, Meta(description="a JSON schema")]


class JsonSchemaFormat(msgspec.Struct, frozen=True, tag_field="type", tag="json_schema"):
    json_schema: JsonSchema


class GenerationBody(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the bodies that generate. `user` and `metadata`, which clients send by default, are checked
    and have no effect."""

    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    """The newer name of `max_tokens`, and stronger."""
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Int64 | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=1024)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=64)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    priority: Priority | None = None
    prefix_cache: bool | None = None
    cache_salt: Annotated[str, Meta(max_length=512)] | None = None
    user: str | None = None
    metadata: dict[str, object] | None = None

    def generation(
        self, prompts: list[Prompt], limits: ModelLimits, default_tokens: int, logprobs: int
    ) -> GenerationRequest:
        """`default_tokens`: `max_tokens` where it is not given. `logprobs` as in `SamplingParams`.

        Raises:
            ApiError: 400, or 404 for a model that is not served.
        """
        check_model(self.model, limits)
        if isinstance(self.response_format, JsonObjectFormat | JsonSchemaFormat):
            raise bad_request(
                "response_format other than text is not supported yet.", "response_format"
            )
        if self.n is not None and self.n > limits.max_choices:
            raise bad_request(f"n must be an integer from 1 to {limits.max_choices}.", "n")
        _check_choices(len(prompts), self.n or 1, limits)
        if self.priority and not limits.allow_priority:
            raise bad_request(
                "priority other than 0 is only allowed where the server runs with --allow-priority.",
                "priority",
            )
        options = self.stream_options or StreamOptions()
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options is only allowed with stream: true.", "stream_options")
        sampling = self._sampling(limits, default_tokens, logprobs)
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return GenerationRequest(
            prompts=prompts,
            generate=Generate(
                sampling=sampling,
                priority=self.priority or 0,
                prefix_cache=self.prefix_cache is not False,
                cache_salt=self.cache_salt or "",
            ),
            stops=StopRule(tuple(dict.fromkeys(stops)), sampling.min_tokens),
            n=self.n or 1,
            stream=self.stream or False,
            include_usage=options.include_usage or False,
            continuous_usage=options.continuous_usage_stats or False,
        )

    def _sampling(self, limits: ModelLimits, default_tokens: int, logprobs: int) -> SamplingParams:
        max_tokens, min_tokens = self._token_limits(limits.max_model_len, default_tokens)
        check_ids(self.stop_token_ids or [], "stop_token_ids", limits)
        default = limits.sampling
        top_k = default.top_k if self.top_k is None else self.top_k
        check_ids(list(self.logit_bias or {}), "logit_bias", limits)
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=default.temperature if self.temperature is None else self.temperature,
            top_p=self.top_p or default.top_p,
            top_k=min(max(top_k, 0), limits.vocab_size),
            min_p=default.min_p if self.min_p is None else self.min_p,
            seed=random.getrandbits(63) if self.seed is None else self.seed,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=self.repetition_penalty or default.repetition_penalty,
            logit_bias=tuple((self.logit_bias or {}).items()),
            logprobs=logprobs,
            min_tokens=min_tokens,
            ignore_eos=self.ignore_eos or False,
            stop_token_ids=tuple(dict.fromkeys(self.stop_token_ids or ())),
        )

    def _token_limits(self, max_model_len: int, default: int) -> tuple[int, int]:
        """`max_tokens`, cut to the context length, and `min_tokens`."""
        wanted = self.max_completion_tokens or self.max_tokens
        max_tokens = min(wanted or default, max_model_len)
        min_tokens = self.min_tokens or 0
        if min_tokens > max_tokens:
            if max_tokens == max_model_len:
                limit = f"the context length of {max_model_len} tokens"
            elif wanted is None:
                limit = f"max_tokens, which is {default} where it is not given"
            else:
                limit = f"max_tokens, which is {max_tokens}"
            raise bad_request(f"min_tokens is {min_tokens}, more than {limit}.", "min_tokens")
        return max_tokens, min_tokens


def _check_choices(prompts: int, n: int, limits: ModelLimits) -> None:
    most = max(MAX_SEQUENCES, limits.max_choices)
    if prompts * n > most:
        raise bad_request(
            f"{prompts} prompts with n {n} make {prompts * n} answers: a request may have {most}.",
            "n",
        )


def check_model(name: str | None, limits: ModelLimits) -> None:
    """A request must name the served model, or none.

    Raises:
        ApiError: 404.
    """
    if name is not None and name != limits.model_name:
        raise ApiError(
            404,
            f"The model {name[:200]!r} does not exist here: this server has {limits.model_name!r}.",
            param="model",
            code="model_not_found",
        )


def check_ids(ids: list[int], param: str, limits: ModelLimits) -> None:
    """
    Raises:
        ApiError: 400, not all are of the model's vocabulary.
    """
    if ids and max(ids) >= limits.vocab_size:
        raise bad_request(
            f"{param} must hold token ids from 0 to {limits.vocab_size - 1} alone.", param
        )
