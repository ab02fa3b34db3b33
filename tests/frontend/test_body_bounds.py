"""What cannot be served is refused for its size, before it is decoded, walked or sent on."""

from __future__ import annotations

import json

import pytest

from frontend.api.openai_chat import read_chat
from frontend.api.openai_completions import read_completion
from frontend.api.tokenize import read_detokenize, read_tokenize
from frontend.errors import ApiError
from frontend.generation.request import ModelLimits
from frontend.http.json_bounds import MAX_DIGITS, MAX_ELEMENTS, check_bounds

LIMITS = ModelLimits("served", 1000, 100, 8, max_token_bytes=4)
"""A context of 100 tokens, which is 400 bytes of text at most."""


def refusal(read, **fields) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(json.dumps(fields).encode(), LIMITS)
    assert caught.value.status == 400
    return caught.value


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "a" * 500, "parameters": {}},
}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "a" * 500}}


@pytest.mark.parametrize(
    ("read", "fields", "param"),
    [
        (read_completion, {"prompt": "a" * 401}, "prompt"),
        (read_completion, {"prompt": ["a", "é" * 201]}, "prompt[1]"),
        (read_completion, {"prompt": [1] * 101}, "prompt"),
        (read_completion, {"prompt": [[1], [1] * 101]}, "prompt[1]"),
        (read_chat, {"messages": user("a" * 401)}, "messages"),
        (read_chat, {"messages": user("a" * 300) + user("a" * 101)}, "messages"),
        (read_chat, {"messages": user("") * 101}, "messages"),
        (read_chat, {"messages": user("a"), "tools": [TOOL]}, "messages"),
        (read_chat, {"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, "messages"),
        (
            read_chat,
            {"messages": [{"role": "assistant", "reasoning_content": "a" * 401}]},
            "messages",
        ),
        (read_tokenize, {"prompt": "a" * 401}, "prompt"),
        (read_tokenize, {"content": "a" * 401}, "content"),
        (read_tokenize, {"messages": user("a" * 401)}, "messages"),
        (read_detokenize, {"tokens": [1] * 101}, "tokens"),
    ],
)
def test_what_cannot_fit_is_refused_by_name(read, fields, param):
    error = refusal(read, **fields)
    assert (error.param, error.code) == (param, "context_length_exceeded")
    assert "maximum context length of 100 tokens" in error.message


@pytest.mark.parametrize(
    ("read", "fields"),
    [
        (read_completion, {"prompt": "a" * 400}),
        (read_completion, {"prompt": [1] * 100}),
        # Line ends are two bytes each in JSON, and one in the prompt.
        (read_chat, {"messages": user("\n" * 400)}),
        (read_tokenize, {"prompt": "a" * 400}),
        (read_detokenize, {"tokens": [1] * 100}),
    ],
)
def test_what_might_fit_is_taken(read, fields):
    read(json.dumps(fields).encode(), LIMITS)


def test_the_length_is_looked_at_before_the_ids():
    error = refusal(read_completion, prompt=[5000] * 101)
    assert error.code == "context_length_exceeded"


def test_where_tokens_have_no_longest_text_any_text_is_taken():
    limits = ModelLimits("served", 1000, 100, 8)
    read_completion(json.dumps({"prompt": "a" * 10_000}).encode(), limits)


def test_prompts_times_n_is_bounded():
    error = refusal(read_completion, prompt=["a"] * 33, n=8)
    assert error.param == "n"
    assert "264 answers" in error.message
    assert len(read_completion(b'{"prompt": %s, "n": 8}' % _strings(32), LIMITS).prompts) == 32


def _strings(count: int) -> bytes:
    return json.dumps(["a"] * count).encode()


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b"[]," * MAX_ELEMENTS + b"1]",
        b"[" + b"1," * MAX_ELEMENTS + b"1]",
        b"{" + b'"":1,' * (MAX_ELEMENTS // 2 + 1) + b'"":1}',
        b"[" * (MAX_ELEMENTS + 1),
        b'["\\"",' + b"1," * MAX_ELEMENTS + b"1]",
    ],
    ids=["arrays", "numbers", "keys", "depth", "after a quote"],
)
def test_too_many_elements(body):
    with pytest.raises(ApiError, match="more than 2000000 keys and elements"):
        check_bounds(body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"temperature": 0.%s}' % (b"1" * (MAX_DIGITS + 1)),
        b"[%s]" % (b"98" * MAX_DIGITS),
        b"[1e%s]" % (b"0" * (MAX_DIGITS + 1)),
    ],
)
def test_too_long_numbers(body):
    with pytest.raises(ApiError, match="more than 128 digits"):
        check_bounds(body)


@pytest.mark.parametrize(
    "body",
    [
        b'["%s"]' % (b"[{,:" * MAX_ELEMENTS),
        b'["%s"]' % (b'\\",[' * MAX_ELEMENTS),
        b'["\\\\", "%s", "\\\\"]' % (b"7" * 1000),
        b"[0.%s]" % (b"1" * MAX_DIGITS),
    ],
    ids=["structure in a text", "quotes in a text", "digits in a text", "digits"],
)
def test_texts_may_hold_anything(body):
    check_bounds(body)


def test_a_body_is_bounded_before_it_is_decoded():
    error = refusal(read_chat, messages=user("a"), metadata={"a": int("1" * 129)})
    assert "more than 128 digits" in error.message
