"""What a client says arrives where it acts: each field of a body, at a value that is not its default, is
followed over HTTP and the wire to the engine's parameters and to the input of the chat template.

The tables are compared with the fields of the structs: a new field fails here until it is followed too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import fields, replace
from tokenizers import Tokenizer, models

from frontend.api.openai_chat import ChatBody, read_chat
from frontend.api.openai_completions import CompletionBody, read_completion
from frontend.api.openai_conversation import (
    AssistantMessage,
    CalledFunction,
    MessageToolCall,
    SystemMessage,
    ToolMessage,
)
from frontend.conversation import Conversation, Message, ToolCall
from frontend.generation.request import GenerationRequest, ModelLimits, Prompt
from frontend.tokenizer.chat_template import ChatTemplate
from frontend.tokenizer.chat_template_files import TemplateSource
from frontend.tokenizer.load import TokenizerFiles
from tests.support.frontend import Script, request_http
from transport.messages.generate import Generate, SamplingParams
from transport.messages.to_router import Submit

LIMITS = ModelLimits("test-model", 300, 4096, 8, allow_priority=True)
TEMPLATE = (
    "{{ {'messages': messages, 'tools': tools, 'reasoning_effort': reasoning_effort, 'mood': mood,"
    " 'add_generation_prompt': add_generation_prompt} | tojson }}"
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"x": 1}}, "own": True}]
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TURNS = [
    {"role": "system", "content": "s", "name": "ann"},
    {
        "role": "assistant",
        "content": [{"type": "text", "text": "y"}, {"type": "output_text", "text": "z"}],
        "refusal": "no",
        "name": "bob",
        "reasoning_content": "why",
        "tool_calls": [CALL],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "12", "name": "f"},
]
RENDERED_TURNS = [
    {"role": "system", "content": "s", "name": "ann"},
    {
        "role": "assistant",
        "content": "yz",
        "name": "bob",
        "reasoning_content": "why",
        "thinking": "why",  # the other name, which transformers adds
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "12", "name": "f"},
]
CHECKED_ONLY = ""

# field: (value, where it acts, what is there)
GENERATION = {
    "model": ("test-model", CHECKED_ONLY, None),
    "max_tokens": (99, CHECKED_ONLY, None),  # max_completion_tokens is stronger
    "max_completion_tokens": (33, "submit.generate.sampling.max_tokens", 33),
    "min_tokens": (3, "submit.generate.sampling.min_tokens", 3),
    "temperature": (0.3, "submit.generate.sampling.temperature", 0.3),
    "top_p": (0.4, "submit.generate.sampling.top_p", 0.4),
    "top_k": (5, "submit.generate.sampling.top_k", 5),
    "min_p": (0.6, "submit.generate.sampling.min_p", 0.6),
    "seed": (-7, "submit.generate.sampling.seed", -7),
    "presence_penalty": (0.8, "submit.generate.sampling.presence_penalty", 0.8),
    "frequency_penalty": (-0.9, "submit.generate.sampling.frequency_penalty", -0.9),
    "repetition_penalty": (1.1, "submit.generate.sampling.repetition_penalty", 1.1),
    "logit_bias": ({"12": -1.5}, "submit.generate.sampling.logit_bias", ((12, -1.5),)),
    "stop": (["a", "b"], "request.stops.strings", ("a", "b")),
    "stop_token_ids": ([13, 14], "submit.generate.sampling.stop_token_ids", (13, 14)),
    "ignore_eos": (True, "submit.generate.sampling.ignore_eos", True),
    "n": (2, "submit.n", 2),
    "stream": (True, "request.stream", True),
    "stream_options": ({"include_usage": True}, "request.include_usage", True),
    "response_format": ({"type": "text"}, CHECKED_ONLY, None),
    "priority": (-4, "submit.generate.priority", -4),
    "prefix_cache": (False, "submit.generate.prefix_cache", False),
    "cache_salt": ("salt", "submit.generate.cache_salt", "salt"),
    "user": ("u", CHECKED_ONLY, None),
    "metadata": ({"m": 1}, CHECKED_ONLY, None),
}
CHAT = {
    **GENERATION,
    "messages": (TURNS, "messages", RENDERED_TURNS),
    "tools": (TOOLS, "tools", TOOLS),
    "tool_choice": ("auto", "tools", TOOLS),
    "parallel_tool_calls": (True, CHECKED_ONLY, None),
    "functions": (None, CHECKED_ONLY, None),
    "function_call": (None, CHECKED_ONLY, None),
    "audio": (None, CHECKED_ONLY, None),
    "modalities": (["text"], CHECKED_ONLY, None),
    "reasoning_effort": ("high", "reasoning_effort", "high"),
    "add_generation_prompt": (False, "add_generation_prompt", False),
    "continue_final_message": (True, "conversation.continue_final_message", True),
    "chat_template_kwargs": ({"mood": "good"}, "mood", "good"),
    "logprobs": (True, "request.wants_logprobs", True),
    "top_logprobs": (4, "submit.generate.sampling.logprobs", 4),
}
COMPLETION = {
    **GENERATION,
    "prompt": ("Hi", "submit.kind", "text"),
    "logprobs": (None, CHECKED_ONLY, None),  # not together with echo
    "echo": (True, "prompt.echo", "Hi"),
    "add_special_tokens": (False, "submit.add_special_tokens", False),
    "best_of": (2, CHECKED_ONLY, None),
    "suffix": ("", CHECKED_ONLY, None),
}


@dataclass
class Arrived:
    request: GenerationRequest
    submit: Submit
    conversation: Conversation | None = None

    @property
    def prompt(self) -> Prompt:
        return self.request.prompts[0]


def names(struct: type[msgspec.Struct]) -> set[str]:
    return {field.encode_name for field in fields(struct)}


def body_of(table: dict) -> dict:
    return {name: value for name, (value, _, _) in table.items()}


@pytest.fixture
def send(serve):
    """Posts a body; returns the `Submit` and its frame as the router gets them."""

    def post(path: str, body: dict, headers: dict[str, str] | None = None) -> tuple[Submit, bytes]:
        seen = []

        def script(submit: Submit, payload: bytes):
            seen.append((submit, payload))
            return Script()

        server = serve(script, allow_priority=True)
        assert request_http(server, "POST", path, body, headers).status == 200
        return seen[0]

    return post


def test_every_field_of_a_chat_arrives(send):
    assert set(CHAT) == names(ChatBody)
    body = body_of(CHAT)
    submit, frame = send("/v1/chat/completions", body)
    conversation = msgspec.json.decode(frame, type=Conversation)
    files = TokenizerFiles(
        Path(), Tokenizer(models.BPE()), {"default": TemplateSource(TEMPLATE, Path("test"))}, {}
    )
    # The last message is not one that can go on: the template writes nothing of it as it is.
    template_input = json.loads(
        ChatTemplate(files).render(replace(conversation, continue_final_message=False)).text
    )
    arrived = Arrived(read_chat(json.dumps(body).encode(), LIMITS), submit, conversation)
    for name, (_, where, expected) in CHAT.items():
        if where in template_input:
            assert template_input[where] == expected, name
        elif where != CHECKED_ONLY:
            assert attrgetter(where)(arrived) == expected, name


def test_every_field_of_a_completion_arrives(send):
    assert set(COMPLETION) == names(CompletionBody)
    body = body_of(COMPLETION)
    submit, frame = send("/v1/completions", body)
    assert frame == b"Hi"
    arrived = Arrived(read_completion(json.dumps(body).encode(), LIMITS), submit)
    for name, (_, where, expected) in COMPLETION.items():
        if where != CHECKED_ONLY:
            assert attrgetter(where)(arrived) == expected, name


def test_the_tables_leave_nothing_out(send):
    """Every field of a message is sent, and nothing that the wire carries is at its default."""
    system, assistant, tool = TURNS
    for struct, sent in (
        (SystemMessage, system),
        (AssistantMessage, assistant),
        (ToolMessage, tool),
        (MessageToolCall, CALL),
        (CalledFunction, CALL["function"]),
    ):
        assert names(struct) == set(sent) - {"role"}, struct
    submit, frame = send("/v1/chat/completions", body_of(CHAT))
    conversation = msgspec.json.decode(frame, type=Conversation)
    for value in (submit.generate, submit.generate.sampling, conversation):
        assert_no_default(value)
    for struct in (Message, ToolCall):
        seen = [
            m for m in conversation.messages for m in ([m] if struct is Message else m.tool_calls)
        ]
        for field in fields(struct):
            assert any(getattr(value, field.name) != default_of(field) for value in seen), field


def test_a_client_may_say_which_conversation_it_is(send):
    def affinity(prompt: str, session: str | None) -> str:
        headers = {} if session is None else {"X-Session-Affinity": session}
        return send("/v1/completions", {"prompt": prompt}, headers)[0].affinity

    assert affinity("a", "one") == affinity("b", "one")
    assert len({affinity("a", "one"), affinity("a", "two"), affinity("a", None)}) == 3
    assert affinity("a", " ") == affinity("a", None)


def default_of(field: msgspec.structs.FieldInfo) -> object:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


def assert_no_default(value: Generate | SamplingParams | Conversation) -> None:
    for field in fields(value):
        assert getattr(value, field.name) != default_of(field), field
