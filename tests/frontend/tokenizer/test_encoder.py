"""Prompts to ids: what the encoder adds, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.api.openai_chat import read_chat
from frontend.conversation import Conversation, Message
from frontend.errors import ApiError
from frontend.generation.request import ModelLimits
from frontend.tokenizer.encoder import PromptEncoder
from frontend.tokenizer.errors import PromptError
from frontend.tokenizer.load import load_tokenizer
from frontend.tokenizer.render_limits import RenderLimits

WriteCheckpoint = Callable[..., Path]

LIMITS = ModelLimits("served", 1000, 4096, 8)
SMALL = RenderLimits.of(0)


@pytest.fixture(scope="module")
def smollm2(smollm2_dir: Path) -> PromptEncoder:
    return PromptEncoder(load_tokenizer(smollm2_dir))


def chat(**value: object) -> bytes:
    return json.dumps(value).encode()


def test_raw_text_may_use_control_tokens(smollm2: PromptEncoder) -> None:
    encoded = smollm2.encode_text("<|im_start|>user")
    assert encoded.ids.dtype == np.int32
    assert encoded.ids.tolist()[0] == 1
    assert encoded.render_seconds == 0.0
    assert encoded.encode_seconds > 0.0
    assert smollm2.encode_text("").ids.tolist() == []


def test_begin_token_only_where_asked_for(write_checkpoint: WriteCheckpoint) -> None:
    template = "{% for m in messages %}<s>[INST] {{ m.content }} [/INST]{% endfor %}"
    encoder = PromptEncoder(load_tokenizer(write_checkpoint("llama2", template)))
    plain = encoder.encode_text("abc", add_special_tokens=False).ids.tolist()
    assert encoder.encode_text("abc").ids.tolist() == [1, *plain]
    for content in ("abc", "abc </s>"):
        ids = encoder.encode_conversation(Conversation([Message("user", content)]), SMALL).ids
        assert ids.tolist().count(1) == 1


@pytest.mark.parametrize("text", ["\ud800", "a\udfff", "\ud83d"])
def test_lone_surrogates_are_refused(smollm2: PromptEncoder, text: str) -> None:
    with pytest.raises(PromptError, match="surrogate") as caught:
        smollm2.encode_text(text)
    assert caught.value.param == "prompt"
    for content in (text, f"{text}<|im_end|>"):
        with pytest.raises(PromptError, match="surrogate") as caught:
            smollm2.encode_conversation(Conversation([Message("user", content)]), SMALL)
        assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b"[" * 100_000,
        chat(),
        chat(messages=[]),
        chat(messages={}),
        chat(messages=["x"]),
        chat(messages=[{"role": "user", "content": "x"}], tools={}),
        chat(messages=[{"role": "user", "content": "x"}], template_kwargs=[1]),
        b'{"messages": [{"role": "user", "content": ' + b"[" * 900 + b"]" * 900 + b"}]}",
    ],
)
def test_malformed_payloads_are_client_errors(smollm2: PromptEncoder, payload: bytes) -> None:
    with pytest.raises(PromptError):
        smollm2.encode_chat(payload)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "tool_calls", "function", "name"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "assistant", "tool", "developer"]),
        "content": JSON,
    },
    optional={"tool_calls": JSON, "name": JSON, "reasoning_content": JSON, "refusal": JSON},
)


@settings(max_examples=300, deadline=None)
@given(messages=st.lists(MESSAGE | JSON, max_size=4), tools=JSON, kwargs=JSON)
def test_nothing_but_prompt_errors(
    smollm2: PromptEncoder, messages: list[object], tools: object, kwargs: object
) -> None:
    body = chat(messages=messages, tools=tools, chat_template_kwargs=kwargs)
    try:
        encoded = smollm2.encode_chat(read_chat(body, LIMITS).prompts[0].frame)
    except (ApiError, PromptError) as error:
        assert error.message
    else:
        assert encoded.ids.size > 0
