"""Every bad field is refused by name; what clients send by default is accepted."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.api.openai_chat import read_chat
from frontend.api.openai_completions import read_completion
from frontend.api.tokenize import read_detokenize, read_tokenize
from frontend.errors import ApiError
from frontend.generation.request import ModelLimits
from frontend.generation.stop_strings import StopRule
from frontend.http.json_body import decode_body
from frontend.settings import SamplingDefaults

LIMITS = ModelLimits("served", 1000, 4096, 8, allow_priority=True)
USER = {"role": "user", "content": "Hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ASKS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def as_body(values=(), **fields) -> bytes:
    return json.dumps({**fields, **dict(values)}).encode()


def chat(**fields):
    return read_chat(as_body(fields, messages=[USER]), LIMITS)


def completion(**fields):
    return read_completion(as_body(fields, prompt="Hi"), LIMITS)


BAD_EVERYWHERE = [
    ("max_tokens", [0, -1, "8", 1.5, True, []]),
    ("max_completion_tokens", [0, -5, "8", {}]),
    ("temperature", [-0.1, 2.1, "1", True, []]),
    ("top_p", [0, -0.1, 1.1, "x"]),
    ("top_k", [-2, 1.5, "x", True]),
    ("min_p", [-0.1, 1.1]),
    ("seed", [2**63, -(2**63) - 1, 1.5, "x"]),
    ("stop", ["", [""], [1], 5, {}, True, [None], ["x"] * 65, ["x" * 20_000]]),
    ("stop_token_ids", [[1000], [-1], ["x"], [1.5], "x", 5, [None], [True]]),
    ("presence_penalty", [-2.1, 2.1, "x"]),
    ("frequency_penalty", [-2.1, 2.1, "x"]),
    ("repetition_penalty", [0, -1, "x"]),
    (
        "logit_bias",
        [{"1000": 1}, {"-1": 1}, {"x": 1}, {"5": 101}, {"5": "x"}, {"5": None}, [], {"²": 1}],
    ),
    ("n", [0, 9, "1", True]),
    ("stream", ["true", 1, []]),
    ("stream_options", [{"include_usage": True}, "x"]),
    ("ignore_eos", [1, "x"]),
    ("min_tokens", [-1, 5000, "x"]),
    ("user", [5]),
    ("metadata", ["x", 5]),
    ("priority", ["x", 1.5, -1001, 1001, -(2**63)]),
    ("prefix_cache", [1, "yes"]),
    ("cache_salt", [5, {}]),
    ("model", [7, "other", ""]),
    (
        "response_format",
        ["json", {}, {"type": "xml"}, {"type": "json_object"}, {"type": "json_schema"}],
    ),
]
BAD_CHAT = [
    ("logprobs", [1, "x"]),
    ("top_logprobs", [5, -1, 21, True]),
    ("messages", [[], "x", {}, [5], [{"role": "narrator", "content": "x"}], [{"role": "user"}]]),
    ("messages", [[{"role": "user", "content": [{"type": "image_url"}]}], [{"content": "x"}]]),
    (
        "tools",
        [
            "x",
            {},
            [5],
            [{}],
            [{"type": "function"}],
            [{"type": "function", "function": {"name": ""}}],
        ],
    ),
    (
        "tool_choice",
        ["banana", 5, [], {}, "required", {"type": "function", "function": {"name": "f"}}],
    ),
    ("modalities", [["text", "audio"], "text"]),
    ("chat_template_kwargs", ["x", {"messages": []}]),
    ("functions", [[{}]]),
]
BAD_COMPLETION = [
    ("prompt", [5, [], [[]], {}, [1000], [-1], [1.5], ["x", 5], [None], [True], [["x"]]]),
    ("logprobs", [True, -1, 21, "x"]),
    ("suffix", ["x", 5]),
    ("best_of", [2, "x"]),
    ("echo", ["x"]),
]


def cases(table):
    return [(name, value) for name, values in table for value in values]


@pytest.mark.parametrize(("name", "value"), cases(BAD_EVERYWHERE + BAD_CHAT))
def test_chat_refuses_by_name(name, value):
    with pytest.raises(ApiError) as caught:
        chat(**{name: value})
    assert caught.value.status == (404 if value in ("other", "") and name == "model" else 400)
    assert name in caught.value.param
    assert caught.value.message


@pytest.mark.parametrize(("name", "value"), cases(BAD_EVERYWHERE + BAD_COMPLETION))
def test_completions_refuse_by_name(name, value):
    with pytest.raises(ApiError) as caught:
        completion(**{name: value})
    assert name in caught.value.param


@pytest.mark.parametrize(
    "name", sorted({name for name, _ in BAD_EVERYWHERE + BAD_CHAT} - {"messages"})
)
def test_null_is_absent(name):
    given_null, absent = chat(**{name: None}), chat()
    assert given_null.prompts == absent.prompts
    assert given_null.stops == absent.stops
    assert given_null.generate.sampling.max_tokens == LIMITS.max_model_len


@pytest.mark.parametrize("priority", [-1, 1])
def test_only_an_instance_that_allows_it_lets_requests_overtake_others(priority):
    closed = msgspec.structs.replace(LIMITS, allow_priority=False)
    with pytest.raises(ApiError) as caught:
        read_chat(as_body(messages=[USER], priority=priority), closed)
    assert (caught.value.status, caught.value.param) == (400, "priority")
    assert "--allow-priority" in caught.value.message
    assert chat(priority=priority).generate.priority == priority
    for harmless in (0, None):
        request = read_chat(as_body(messages=[USER], priority=harmless), closed)
        assert request.generate.priority == 0


def test_values_arrive():
    request = chat(
        max_tokens=9, max_completion_tokens=7, temperature=0, top_p=0.5, top_k=-1, min_p=0.1,
        seed=-5, stop=["a", "b", "a"], stop_token_ids=[3], presence_penalty=1,
        frequency_penalty=-1, repetition_penalty=1.2, logit_bias={"5": -100}, logprobs=True,
        top_logprobs=3, n=2, stream=True, stream_options={"continuous_usage_stats": True},
        ignore_eos=True, min_tokens=2, priority=-3, model="served",
    )  # fmt: skip
    sampling = request.generate.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (7, 0.0, 0.5)
    assert (sampling.top_k, sampling.min_p, sampling.seed) == (0, 0.1, -5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.0)
    assert (sampling.repetition_penalty, sampling.logit_bias) == (1.2, ((5, -100.0),))
    assert (sampling.logprobs, sampling.min_tokens, sampling.ignore_eos) == (3, 2, True)
    assert sampling.stop_token_ids == (3,)
    assert (request.stops, request.n, request.generate.priority) == (StopRule(("a", "b"), 2), 2, -3)
    assert (request.include_usage, request.continuous_usage) == (False, True)


@pytest.mark.parametrize(
    ("read", "prompt"), [(read_chat, {"messages": [USER]}), (read_completion, {"prompt": "Hi"})]
)
def test_the_models_sampling_holds_where_a_request_does_not_say(read, prompt):
    def chosen(**fields) -> tuple[float, ...]:
        sampling = read(as_body(fields, **prompt), limits).generate.sampling
        return (
            sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p,
            sampling.repetition_penalty,
        )  # fmt: skip

    limits = ModelLimits("served", 1000, 4096, 8, SamplingDefaults(0.2, 0.9, 40, 0.1, 1.3))
    assert chosen() == (0.2, 0.9, 40, 0.1, 1.3)
    assert chosen(temperature=None, top_k=None) == (0.2, 0.9, 40, 0.1, 1.3)
    assert chosen(temperature=0) == (0.0, 0.9, 40, 0.1, 1.3)
    given = dict(temperature=1, top_p=1, top_k=0, min_p=0, repetition_penalty=1)
    assert chosen(**given) == (1.0, 1.0, 0, 0.0, 1.0)
    assert chosen(top_k=-1) == (0.2, 0.9, 0, 0.1, 1.3)
    limits = ModelLimits("served", 1000, 4096, 8, SamplingDefaults(top_k=5000))
    assert chosen() == (1.0, 1.0, 1000, 0.0, 1.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": True}, "temperature must be a number from 0 to 2."),
        ({"top_p": 0}, "top_p must be a number greater than 0 and at most 1."),
        ({"stream": 1}, "stream must be true or false."),
        ({"stop": ["a", ""]}, "stop[1] must be a non-empty string of at most 16384 characters."),
        (
            {"stop": 5},
            "stop must be a non-empty string of at most 16384 characters or an array of at most 64 items.",
        ),
        (
            {"logit_bias": {str(i): 1 for i in range(1025)}},
            "logit_bias must be an object of at most 1024 entries.",
        ),
        ({"logit_bias": {"x": 1}}, "A key of logit_bias must be an integer of at least 0."),
        ({"logit_bias": {"5": 101}}, "A value of logit_bias must be a number from -100 to 100."),
        (
            {"seed": 2**63},
            "seed must be an integer from -9223372036854775808 to 9223372036854775807.",
        ),
        (
            {"response_format": {"type": "xml"}},
            'response_format.type must be "text", "json_object" or "json_schema".',
        ),
        (
            {"response_format": {}},
            'response_format.type is missing: it must be "text", "json_object" or "json_schema".',
        ),
        ({"suffix": "x"}, "suffix must be absent: the model cannot fill a gap."),
        (
            {"prompt": {}},
            "prompt must be a string, an array of strings, an array of token ids or an array of those.",
        ),
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1."),
        ({"max_completion_tokens": "x"}, "max_completion_tokens must be an integer of at least 1."),
        ({"top_k": -2}, "top_k must be an integer of at least -1."),
        ({"min_tokens": -1}, "min_tokens must be an integer of at least 0."),
        ({"n": 9}, "n must be an integer from 1 to 8."),
        (
            {"min_tokens": 20},
            "min_tokens is 20, more than max_tokens, which is 16 where it is not given.",
        ),
        (
            {"min_tokens": 6, "max_tokens": 5},
            "min_tokens is 6, more than max_tokens, which is 5.",
        ),
        (
            {"min_tokens": 5000, "max_tokens": 6000},
            "min_tokens is 5000, more than the context length of 4096 tokens.",
        ),
    ],
)
def test_refusals_tell_the_limit_that_holds(fields, message):
    with pytest.raises(ApiError) as caught:
        completion(**fields)
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("message", "param", "wanted"),
    [
        (
            {"role": "user", "content": {"type": "text"}},
            ".content",
            "a string or an array of text parts",
        ),
        (
            {"role": "user", "content": [{"type": "image_url"}]},
            ".content[0].type",
            '"text", "input_text", "output_text" or "refusal"',
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, 7]},
            ".content[1]",
            "an object",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, ".content[0].text", "a string"),
        (
            {"content": "x"},
            ".role",
            '"system", "developer", "user", "tool" or "assistant"',
        ),
        ("x", "", "an object"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, ".tool_calls", "an array"),
        (
            {"role": "assistant", "tool_calls": [{"id": "c"}]},
            ".tool_calls[0].function",
            "an object",
        ),
        (
            {
                "role": "assistant",
                "tool_calls": [{**CALL, "function": {"name": "f", "arguments": 5}}],
            },
            ".tool_calls[0].function.arguments",
            "an object or a string",
        ),
    ],
)
def test_malformed_messages_are_named(message, param, wanted):
    with pytest.raises(ApiError) as caught:
        chat(messages=[USER, message])
    assert caught.value.param == f"messages[1]{param}"
    assert caught.value.message.startswith(f"messages[1]{param} ")
    assert caught.value.message.endswith(f"must be {wanted}.")


@pytest.mark.parametrize(
    "kwargs",
    [
        {"messages": []},
        {"chat_template": "x"},
        {"self": 1},
        {"continue_final_message": "yes"},
        {"continue_final_message": True, "add_generation_prompt": True},
    ],
)
def test_template_arguments_that_are_refused(kwargs):
    with pytest.raises(ApiError) as caught:
        chat(chat_template_kwargs=kwargs)
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize("name", ["add_generation_prompt", "continue_final_message"])
def test_how_the_prompt_ends_may_be_a_field_or_a_template_argument(name):
    field = chat(**{name: name == "continue_final_message"})
    argument = chat(chat_template_kwargs={name: name == "continue_final_message"})
    assert field.prompts == argument.prompts != chat().prompts


def test_limits_beyond_the_context_are_cut_to_it_however_large():
    sampling = completion(max_tokens=10**30, top_k=10**30, min_tokens=4096).generate.sampling
    assert (sampling.max_tokens, sampling.top_k) == (LIMITS.max_model_len, LIMITS.vocab_size)


def test_seeds_are_drawn_where_none_is_given():
    assert len({chat().generate.sampling.seed for _ in range(5)}) == 5


def test_prompts_of_all_forms():
    kinds = [p.kind for p in completion(prompt=["a", [1, 2]]).prompts]
    assert kinds == ["text", "tokens"]
    assert bytes(completion(prompt=[1, 2]).prompts[0].frame) == b"\1\0\0\0\2\0\0\0"
    assert completion().generate.sampling.max_tokens == 16


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "tool", "tool_call_id": "c1", "content": "x"}, USER],
        [USER, {"role": "tool", "tool_call_id": "c1", "content": "x"}],
        [USER, ASKS, {"role": "tool", "content": "x"}],
        [USER, ASKS, {"role": "tool", "tool_call_id": "zz", "content": "x"}],
        [USER, ASKS, USER, {"role": "tool", "tool_call_id": "c1", "content": "x"}],
        [USER, {**ASKS, "tool_calls": {}}],
        [USER, {**ASKS, "tool_calls": [{"id": "c1", "type": "function"}]}],
        [USER, {**ASKS, "tool_calls": [{**CALL, "id": None}]}],
    ],
)
def test_tool_results_must_answer_a_call(messages):
    with pytest.raises(ApiError) as caught:
        chat(messages=messages)
    assert caught.value.param.startswith("messages[")


@pytest.mark.parametrize(
    "arguments", ["", "{}", None, "[]", "{bad", "null", '{"a": NaN}', {"a": 1}]
)
def test_odd_arguments_in_the_history_never_end_a_conversation(arguments):
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    answer = {"role": "tool", "tool_call_id": "c1", "content": "x"}
    chat(messages=[USER, {**ASKS, "tool_calls": [call]}, answer], tools=[TOOL])


def test_parts_and_roles_make_the_same_prompt():
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    assert chat(messages=[{"role": "user", "content": parts}]).prompts == chat().prompts
    with_developer = chat(messages=[{"role": "developer", "content": "x"}, USER])
    assert (
        with_developer.prompts == chat(messages=[{"role": "system", "content": "x"}, USER]).prompts
    )


def test_conversations_keep_their_affinity():
    longer = [USER, {"role": "assistant", "content": "Yes"}, {"role": "user", "content": "More"}]
    assert chat(messages=longer).prompts[0].affinity == chat().prompts[0].affinity


def test_tools_are_hidden_with_choice_none():
    assert chat(tools=[TOOL], tool_choice="none").prompts == chat().prompts
    assert chat(tools=[TOOL]).prompts != chat().prompts


def test_tokenize_and_detokenize():
    assert read_tokenize(as_body(content="x"), LIMITS).kind == "text"
    assert read_tokenize(as_body(messages=[USER]), LIMITS).kind == "chat"
    assert read_detokenize(as_body(tokens=[1, 2]), LIMITS) == [1, 2]
    for body in ({}, {"prompt": "x", "content": "y"}, {"prompt": 5}):
        with pytest.raises(ApiError):
            read_tokenize(as_body(body), LIMITS)
    for tokens in (None, "x", [1000], [True]):
        with pytest.raises(ApiError):
            read_detokenize(as_body(tokens=tokens), LIMITS)


ANY_OBJECT = msgspec.json.Decoder(dict[str, object])


@pytest.mark.parametrize(
    "body",
    [
        *[b"", b" ", b"[]", b"5", b"{", b"{} x", b'{"a": NaN}', b"\xff\xfe{}", b"{'a': 1}"],
        *[b'{"a": "\xf1"}', b"[" * 100_000, b'{"a": 1e999}', b'{"a": 1}\x00'],
    ],
)
def test_bodies_that_are_no_json_object(body):
    with pytest.raises(ApiError) as caught:
        decode_body(body, ANY_OBJECT)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "value",
    [
        b"NaN",
        b'"\xf1"',
        b'"\\ud800"',
        b"'x'",
        b"01",
        b"[" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
    ],
)
def test_fields_that_nobody_reads_must_be_json_too(value):
    with pytest.raises(ApiError) as caught:
        read_completion(b'{"prompt": "x", "frobnicate": ' + value + b"}", LIMITS)
    assert caught.value.status == 400
    assert read_completion(b'{"prompt": "x", "frobnicate": {"y": [1]}}', LIMITS).prompts


def test_a_role_given_twice():
    body = b'{"messages": [{"role": "user", "content": "a", "role": "%s"}]}'
    assert (
        read_chat(body % b"user", LIMITS).prompts
        == chat(messages=[{**USER, "content": "a"}]).prompts
    )
    with pytest.raises(ApiError) as caught:
        read_chat(body % b"assistant", LIMITS)
    assert caught.value.message == "messages[0].role is given twice, with different values."


def test_a_number_beyond_all_bounds_is_named():
    with pytest.raises(ApiError) as caught:
        read_completion(b'{"prompt": "x", "metadata": {"a": [1e999]}}', LIMITS)
    assert caught.value.param == "metadata"


def test_byte_order_mark_and_repeated_keys():
    assert decode_body(b'\xef\xbb\xbf{"a": 1, "a": 2}', ANY_OBJECT) == {"a": 2}
    body = b'\xef\xbb\xbf{"prompt": "x", "n": 1, "n": 2}'
    assert read_completion(body, LIMITS).n == 2


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = sorted({name for name, _ in BAD_EVERYWHERE + BAD_CHAT + BAD_COMPLETION} | {"tools"})


@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4))
def test_any_json_is_read_or_refused(fields):
    for read in (read_chat, read_completion):
        try:
            read(as_body(fields, messages=[USER], prompt="x"), LIMITS)
        except ApiError as error:
            assert error.status in (400, 404)
