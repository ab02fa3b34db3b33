"""The bodies of `/tokenize` and `/detokenize`."""

from __future__ import annotations

from frontend.errors import bad_request
from frontend.http.json_body import JsonObject
from frontend.request_schema.chat import read_chat_prompt
from frontend.request_schema.completions import read_ids
from frontend.request_schema.fields import Fields
from frontend.request_schema.limits import ModelLimits
from frontend.request_schema.prompts import Prompt, text_prompt
from frontend.request_schema.sampling import check_model


def read_tokenize(body: JsonObject, limits: ModelLimits) -> Prompt:
    """What to encode: `prompt` or `content` (a string), or `messages` (a conversation).

    Raises:
        ApiError: 400 or 404, naming the field.
    """
    fields = Fields(body)
    check_model(fields, limits.model_name)
    special = fields.boolean("add_special_tokens", True)
    given = [name for name in ("prompt", "content", "messages") if fields.has(name)]
    if len(given) != 1:
        raise bad_request("Give one of prompt, content and messages.", "prompt")
    if given == ["messages"]:
        return read_chat_prompt(fields)
    return text_prompt(fields.string(given[0]) or "", special)


def read_detokenize(body: JsonObject, limits: ModelLimits) -> list[int]:
    """The ids to decode.

    Raises:
        ApiError: 400 or 404, naming the field.
    """
    fields = Fields(body)
    check_model(fields, limits.model_name)
    tokens = fields.array("tokens")
    if tokens is None:
        raise fields.refuse("tokens", "an array of token ids")
    return read_ids(tokens, "tokens", limits)
