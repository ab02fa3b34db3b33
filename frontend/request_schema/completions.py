"""The body of `/v1/completions`."""

from __future__ import annotations

from frontend.errors import bad_request
from frontend.http.json_body import JsonObject
from frontend.request_schema.fields import Fields, is_integer
from frontend.request_schema.limits import (
    COMPLETIONS_DEFAULT_TOKENS,
    MAX_PROMPTS,
    MAX_TOP_LOGPROBS,
    ModelLimits,
)
from frontend.request_schema.prompts import (
    GenerationRequest,
    Prompt,
    text_prompt,
    token_prompt,
)
from frontend.request_schema.response_format import check_response_format
from frontend.request_schema.sampling import read_common

WANTED = "a string, an array of strings, an array of token ids or an array of those"


def read_completion(body: JsonObject, limits: ModelLimits) -> GenerationRequest:
    """Check a completion request.

    Raises:
        ApiError: 400 or 404, naming the field.
    """
    fields = Fields(body)
    logprobs = fields.integer("logprobs", 0, MAX_TOP_LOGPROBS)
    common = read_common(
        fields, limits, COMPLETIONS_DEFAULT_TOKENS, -1 if logprobs is None else logprobs
    )
    check_response_format(fields)
    if fields.string("suffix"):
        raise bad_request("suffix is not supported: the model cannot fill a gap.", "suffix")
    best_of = fields.integer("best_of", 1, limits.max_choices)
    if best_of is not None and best_of != common.n:
        raise bad_request("best_of is only supported where it equals n.", "best_of")
    echo = fields.boolean("echo")
    if echo and logprobs is not None:
        raise bad_request("echo is not supported together with logprobs.", "echo")
    special = fields.boolean("add_special_tokens", True)
    prompts = _read_prompts(fields, limits, special, echo)
    return GenerationRequest(common, prompts, echo)


def _read_prompts(fields: Fields, limits: ModelLimits, special: bool, echo: bool) -> list[Prompt]:
    value = fields.raw("prompt")
    if isinstance(value, str):
        return [text_prompt(value, special, echo)]
    if not isinstance(value, list) or not value:
        raise fields.refuse("prompt", WANTED)
    if all(is_integer(token) for token in value):
        return [token_prompt(read_ids(value, "prompt", limits), echo)]
    if len(value) > MAX_PROMPTS:
        raise fields.refuse("prompt", f"an array of at most {MAX_PROMPTS} prompts")
    prompts: list[Prompt] = []
    for position, item in enumerate(value):
        if isinstance(item, str):
            prompts.append(text_prompt(item, special, echo))
        elif isinstance(item, list) and item:
            prompts.append(token_prompt(read_ids(item, f"prompt[{position}]", limits), echo))
        else:
            raise fields.refuse("prompt", WANTED)
    return prompts


def read_ids(values: list[object], path: str, limits: ModelLimits) -> list[int]:
    """Token ids of the model's vocabulary.

    Raises:
        ApiError: 400, something else is among them.
    """
    top = limits.vocab_size
    ids = [value for value in values if is_integer(value) and 0 <= value < top]
    if len(ids) != len(values):
        raise bad_request(f"{path} must hold token ids from 0 to {top - 1} alone.", path)
    return ids
