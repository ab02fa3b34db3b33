"""The body of `/v1/chat/completions`."""

from __future__ import annotations

from frontend.errors import bad_request
from frontend.http.json_body import JsonObject
from frontend.request_schema.fields import Fields
from frontend.request_schema.history import first_user_text, read_messages
from frontend.request_schema.limits import MAX_TOP_LOGPROBS, ModelLimits
from frontend.request_schema.prompts import GenerationRequest, Prompt, chat_prompt
from frontend.request_schema.response_format import check_response_format
from frontend.request_schema.sampling import read_common
from frontend.request_schema.tools import read_tools

RESERVED_KWARGS = ("messages", "tools", "documents", "add_generation_prompt", "tokenize")
"""Arguments of the template that are not the client's to set."""


def read_chat(body: JsonObject, limits: ModelLimits) -> GenerationRequest:
    """Check a chat request.

    Raises:
        ApiError: 400 or 404, naming the field.
    """
    fields = Fields(body)
    common = read_common(fields, limits, limits.max_model_len, _read_logprobs(fields))
    check_response_format(fields)
    _check_modalities(fields)
    return GenerationRequest(common, [read_chat_prompt(fields)])


def read_chat_prompt(fields: Fields) -> Prompt:
    """Messages, tools and arguments of the template.

    Raises:
        ApiError: 400, naming the field.
    """
    tools = read_tools(fields)
    messages = read_messages(fields)
    return chat_prompt(messages, tools, _read_kwargs(fields), first_user_text(messages))


def _read_logprobs(fields: Fields) -> int:
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top is not None and top > 0 and not wanted:
        raise bad_request("top_logprobs is only allowed with logprobs: true.", "top_logprobs")
    return (top or 0) if wanted else -1


def _check_modalities(fields: Fields) -> None:
    modalities = fields.array("modalities")
    if modalities is not None and modalities != ["text"]:
        raise fields.refuse("modalities", '["text"]: the model gives nothing else')
    if fields.has("audio"):
        raise bad_request("audio is not supported: the model gives text alone.", "audio")


def _read_kwargs(fields: Fields) -> JsonObject:
    kwargs = dict(fields.mapping("chat_template_kwargs") or {})
    for name in RESERVED_KWARGS:
        if name in kwargs:
            raise bad_request(f"chat_template_kwargs must not set {name}.", "chat_template_kwargs")
    effort = fields.string("reasoning_effort")
    if effort is not None:
        kwargs.setdefault("reasoning_effort", effort)
    return kwargs
