"""How to choose tokens: the fields that chat and completions share."""

from __future__ import annotations

import random

import msgspec

from frontend.errors import ApiError, bad_request
from frontend.generation.stop_strings import StopRule
from frontend.request_schema.fields import Fields, is_integer
from frontend.request_schema.limits import (
    MAX_BIASES,
    MAX_SALT_CHARACTERS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    ModelLimits,
)
from transport.messages.generate import Generate, SamplingParams

INT64 = 2**63
MAX_BIAS = 100


class Common(msgspec.Struct, frozen=True):
    """What every generating request says."""

    generate: Generate
    stops: StopRule
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool

    @property
    def wants_logprobs(self) -> bool:
        return self.generate.sampling.logprobs >= 0


def read_common(fields: Fields, limits: ModelLimits, default_tokens: int, logprobs: int) -> Common:
    """Read and check everything but the prompt. `logprobs` as in `SamplingParams`.

    Raises:
        ApiError: 400, or 404 for a model that is not served.
    """
    check_model(fields, limits.model_name)
    fields.string("user")
    fields.mapping("metadata")
    stream = fields.boolean("stream")
    include_usage, continuous_usage = _read_stream_options(fields, stream)
    sampling = _read_sampling(fields, limits, default_tokens, logprobs)
    return Common(
        generate=Generate(
            sampling=sampling,
            priority=fields.integer("priority", -INT64, INT64 - 1) or 0,
            prefix_cache=fields.boolean("prefix_cache", True),
            cache_salt=_read_salt(fields),
        ),
        stops=StopRule(_read_stops(fields), sampling.min_tokens),
        n=fields.integer("n", 1, limits.max_choices) or 1,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
    )


def _read_salt(fields: Fields) -> str:
    salt = fields.string("cache_salt") or ""
    if len(salt) > MAX_SALT_CHARACTERS:
        raise bad_request(
            f"cache_salt must have at most {MAX_SALT_CHARACTERS} characters.", "cache_salt"
        )
    return salt


def check_model(fields: Fields, served: str) -> None:
    """A request must name the served model, or none."""
    name = fields.string("model")
    if name is not None and name != served:
        raise ApiError(
            404,
            f"The model {name[:200]!r} does not exist here: this server has {served!r}.",
            param="model",
            code="model_not_found",
        )


def _read_stream_options(fields: Fields, stream: bool) -> tuple[bool, bool]:
    options = fields.mapping("stream_options")
    if options is None:
        return False, False
    if not stream:
        raise bad_request("stream_options is only allowed with stream: true.", "stream_options")
    inner = Fields(options, "stream_options")
    inner.boolean("include_obfuscation")
    continuous = inner.boolean("continuous_usage_stats")
    return inner.boolean("include_usage"), continuous


def _read_sampling(
    fields: Fields, limits: ModelLimits, default_tokens: int, logprobs: int
) -> SamplingParams:
    max_tokens, min_tokens = _read_token_limits(fields, limits.max_model_len, default_tokens)
    seed = fields.integer("seed", -INT64, INT64 - 1)
    repetition = fields.number("repetition_penalty", 1.0, 0.0, 100.0)
    if repetition == 0.0:
        raise fields.refuse("repetition_penalty", "greater than 0")
    top_k = fields.integer("top_k", -1, None) or 0
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=fields.number("temperature", 1.0, 0.0, 2.0),
        top_p=_read_top_p(fields),
        top_k=min(max(top_k, 0), limits.vocab_size),
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        seed=random.getrandbits(63) if seed is None else seed,
        presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        repetition_penalty=repetition,
        logit_bias=_read_biases(fields, limits.vocab_size),
        logprobs=logprobs,
        min_tokens=min_tokens,
        ignore_eos=fields.boolean("ignore_eos"),
        stop_token_ids=_read_stop_tokens(fields, limits.vocab_size),
    )


def _read_token_limits(fields: Fields, max_model_len: int, default: int) -> tuple[int, int]:
    """`max_tokens`, cut to the context length, and `min_tokens`."""
    older = fields.integer("max_tokens", 1, None)
    newer = fields.integer("max_completion_tokens", 1, None)
    wanted = newer or older
    max_tokens = min(wanted or default, max_model_len)
    min_tokens = fields.integer("min_tokens", 0, None) or 0
    if min_tokens > max_tokens:
        if max_tokens == max_model_len:
            limit = f"the context length of {max_model_len} tokens"
        elif wanted is None:
            limit = f"max_tokens, which is {default} where it is not given"
        else:
            limit = f"max_tokens, which is {max_tokens}"
        raise bad_request(f"min_tokens is {min_tokens}, more than {limit}.", "min_tokens")
    return max_tokens, min_tokens


def _read_top_p(fields: Fields) -> float:
    top_p = fields.number("top_p", 1.0, 0.0, 1.0)
    if top_p == 0.0:
        raise fields.refuse("top_p", "greater than 0 and at most 1")
    return top_p


def _read_stops(fields: Fields) -> tuple[str, ...]:
    value = fields.raw("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise fields.refuse("stop", "a string or an array of strings")
    if not all(stops):
        raise bad_request("stop must not hold an empty string.", "stop")
    if len(stops) > MAX_STOPS:
        raise bad_request(f"stop must not hold more than {MAX_STOPS} strings.", "stop")
    if any(len(stop) > MAX_STOP_CHARACTERS for stop in stops):
        raise bad_request(
            f"A string of stop must not be longer than {MAX_STOP_CHARACTERS} characters.", "stop"
        )
    return tuple(dict.fromkeys(stops))


def _read_stop_tokens(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    tokens = fields.array("stop_token_ids") or []
    ids = [token for token in tokens if is_integer(token) and 0 <= token < vocab_size]
    if len(ids) != len(tokens):
        raise fields.refuse("stop_token_ids", f"an array of token ids from 0 to {vocab_size - 1}")
    if len(ids) > MAX_STOP_TOKENS:
        raise fields.refuse("stop_token_ids", f"an array of at most {MAX_STOP_TOKENS} ids")
    return tuple(dict.fromkeys(ids))


def _read_biases(fields: Fields, vocab_size: int) -> tuple[tuple[int, float], ...]:
    biases = fields.mapping("logit_bias") or {}
    if len(biases) > MAX_BIASES:
        raise fields.refuse("logit_bias", f"an object with at most {MAX_BIASES} entries")
    inner = Fields(biases, "logit_bias")
    read: list[tuple[int, float]] = []
    for key in biases:
        is_id = key.isascii() and key.isdigit() and len(key) < 20
        if not is_id or int(key) >= vocab_size:
            raise bad_request(
                f"logit_bias: {key[:40]!r} is no token id from 0 to {vocab_size - 1}.", "logit_bias"
            )
        if not inner.has(key):
            raise inner.refuse(key, f"a number from -{MAX_BIAS} to {MAX_BIAS}")
        read.append((int(key), inner.number(key, 0.0, -MAX_BIAS, MAX_BIAS)))
    return tuple(read)
