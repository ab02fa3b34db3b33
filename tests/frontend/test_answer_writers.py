"""What the writers of chat and of completions make of every kind of delta."""

from __future__ import annotations

import asyncio
import json

import pytest

from frontend.api.answers import CollectedAnswer, StreamedAnswer
from frontend.api.app import CHAT, COMPLETIONS
from frontend.api.dialect import AnswerHead
from frontend.errors import ApiError
from frontend.generation.choice import Choice
from frontend.generation.deltas import Finish, Reasoning, Text, ToolCall
from frontend.generation.request import ModelLimits
from frontend.generation.stop_strings import StopRule
from frontend.generation.usage import Usage
from frontend.http.stream_buffer import StreamBuffer
from transport.logprobs import TokenLogprob
from transport.messages.generate import FINISH_LENGTH, FINISH_STOP, RUNNING

LIMITS = ModelLimits("m", 300, 4096, 8)
BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    COMPLETIONS: {"prompt": "Hi"},
}
SENT = [
    Reasoning("Rain"),
    Reasoning("? Ask."),
    Text("Let me "),
    Text("look."),
    ToolCall(0, "call_1", "weather"),
    ToolCall(0, arguments='{"city":'),
    ToolCall(0, arguments='"Ulm"}'),
    ToolCall(1, "call_2", "time", "{}"),
    Finish("tool_calls"),
]
LOGPROB = TokenLogprob(65, -0.5, [(66, -1.5)])


class Texts:
    """Token n is the character n."""

    def decoder(self):
        return self

    def push(self, ids, /):
        return self.decode(ids)

    def flush(self):
        return ""

    def token_text(self, token_id, /):
        return chr(token_id)

    def token_bytes(self, token_id, /):
        return chr(token_id).encode()

    def decode(self, ids, /):
        return "".join(map(chr, ids))


def writer(dialect, **fields):
    request = dialect.form.read(json.dumps({**BODIES[dialect], **fields}).encode(), LIMITS)
    return dialect.writer(AnswerHead("id-1", 7, "m"), request, Texts(), lambda: Usage(3, 2, 5))


def streamed(dialect, deltas, **fields) -> list[dict]:
    """The events of choice 0, without [DONE], whose presence is asserted."""
    written = writer(dialect, stream=True, **fields)
    data = b"".join([written.events(0, delta) for delta in deltas]) + written.end()
    lines = data.decode().removesuffix("\n\n").split("\n\n")
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def collected(dialect, deltas, **fields) -> dict:
    async def collect():
        answer = CollectedAnswer(1)
        for delta in deltas:
            answer.write(0, delta)
        return await answer.result()

    return json.loads(writer(dialect, **fields).answer(asyncio.run(collect())))


def test_a_chat_streams_reasoning_text_and_calls():
    choices = [event["choices"][0] for event in streamed(CHAT, SENT)]
    function = {"name": "weather", "arguments": ""}
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Rain"},
        {"reasoning_content": "? Ask."},
        {"content": "Let me "},
        {"content": "look."},
        {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": function}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Ulm"}'}}]},
        {
            "tool_calls": [
                {
                    "index": 1,
                    "id": "call_2",
                    "type": "function",
                    "function": {"name": "time", "arguments": "{}"},
                }
            ]
        },
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None] * 9 + ["tool_calls"]
    assert all(choice["logprobs"] is None for choice in choices)


def test_a_whole_chat_has_reasoning_text_and_calls():
    (choice,) = collected(CHAT, SENT)["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Let me look.",
        "refusal": None,
        "reasoning_content": "Rain? Ask.",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city":"Ulm"}'},
            },
            {"id": "call_2", "type": "function", "function": {"name": "time", "arguments": "{}"}},
        ],
    }
    assert choice["finish_reason"] == "tool_calls"


def test_calls_without_a_text_have_the_content_null():
    (choice,) = collected(CHAT, [ToolCall(0, "call_1", "f", "{}"), Finish("tool_calls")])["choices"]
    assert choice["message"]["content"] is None
    (choice,) = collected(CHAT, [Finish("stop")])["choices"]
    assert choice["message"] == {"role": "assistant", "content": "", "refusal": None}


def test_a_completion_is_text_alone():
    events = streamed(COMPLETIONS, SENT)
    choices = [event["choices"][0] for event in events]
    assert [choice["text"] for choice in choices] == ["Rain", "? Ask.", "Let me ", "look.", ""]
    assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["stop"]
    (choice,) = collected(COMPLETIONS, SENT)["choices"]
    assert choice == {
        "index": 0,
        "text": "Rain? Ask.Let me look.",
        "logprobs": None,
        "finish_reason": "stop",
    }


@pytest.mark.parametrize("kind", [Text, Reasoning])
def test_reasoning_and_text_carry_the_logprobs_of_their_tokens(kind):
    deltas = [kind("A", LOGPROB, 4), Finish("length")]
    top = {"token": "B", "logprob": -1.5, "bytes": [66]}
    entry = {"token": "A", "logprob": -0.5, "bytes": [65], "top_logprobs": [top]}
    chat = {"logprobs": True, "top_logprobs": 1}
    wanted = {"content": [entry], "refusal": None}
    assert collected(CHAT, deltas, **chat)["choices"][0]["logprobs"] == wanted
    assert streamed(CHAT, deltas, **chat)[1]["choices"][0]["logprobs"] == wanted
    wanted = {
        "tokens": ["A"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"B": -1.5}],
        "text_offset": [4],
    }
    assert collected(COMPLETIONS, deltas, logprobs=1)["choices"][0]["logprobs"] == wanted
    assert streamed(COMPLETIONS, deltas, logprobs=1)[0]["choices"][0]["logprobs"] == wanted


@pytest.mark.parametrize("dialect", [CHAT, COMPLETIONS])
def test_usage_stands_where_it_was_asked_for(dialect):
    usage = collected(dialect, [Finish("stop")])["usage"]
    assert usage["total_tokens"] == 8
    options = {"include_usage": True}
    *events, last = streamed(dialect, SENT, stream_options=options)
    assert all(event["usage"] is None for event in events)
    assert (last["choices"], last["usage"]) == ([], usage)
    options["continuous_usage_stats"] = True
    assert all(e["usage"] == usage for e in streamed(dialect, SENT, stream_options=options))


@pytest.mark.parametrize("dialect", [CHAT, COMPLETIONS])
def test_a_stream_ends_after_the_last_choice_or_a_failure(dialect):
    async def run(fails: bool) -> tuple[bytes, bool]:
        buffer = StreamBuffer(1 << 20, lambda paused: None, 0.0)
        answer = StreamedAnswer(2, writer(dialect, stream=True, n=2), buffer)
        answer.write(0, Text("a"))
        answer.write(0, Finish("stop"))
        answer.write(1, Text("b"))
        if fails:
            answer.fail(ApiError(500, "Broken."))
        else:
            answer.write(1, Finish("stop"))
        return await buffer.take(), buffer.is_drained

    data, is_drained = asyncio.run(run(fails=False))
    assert is_drained
    assert data.count(b'"finish_reason":"stop"') == 2
    assert data.count(b"[DONE]") == 1
    data, is_drained = asyncio.run(run(fails=True))
    assert is_drained
    assert b'"message":"Broken."' in data.split(b"\n\n")[-3]
    assert data.endswith(b"data: [DONE]\n\n")


class Thinking:
    """Reasons up to the first `|`."""

    def __init__(self):
        self.thinks = True

    def push(self, text, /):
        if self.thinks and "|" in text:
            self.thinks = False
            thought, _, said = text.partition("|")
            return [*([Reasoning(thought)] if thought else []), *([Text(said)] if said else [])]
        return [Reasoning(text) if self.thinks else Text(text)]

    def finish(self, reason, /):
        return [ToolCall(0, "call_1", "f", "{}"), Finish("tool_calls")]


def test_a_parser_sits_between_the_text_of_a_choice_and_its_deltas():
    choice = Choice(Texts(), StopRule(("!",)), Thinking())
    deltas = [d for c in "ab|cd" for d in choice.push([ord(c)], RUNNING)]
    assert deltas == [Reasoning("a"), Reasoning("b"), Text("c"), Text("d")]
    end = choice.push([ord("!")], RUNNING)
    assert end == [ToolCall(0, "call_1", "f", "{}"), Finish("tool_calls")]
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize("finish", [FINISH_STOP, FINISH_LENGTH])
def test_a_parser_that_shows_nothing_loses_no_logprobs(finish):
    choice = Choice(Texts(), StopRule(), Thinking())
    assert choice.push([ord("a")], RUNNING, LOGPROB) == [Reasoning("a", LOGPROB, 0)]
    assert choice.push([ord("|")], RUNNING, LOGPROB) == [Text("", LOGPROB, 1)]
    *deltas, _, _ = choice.push([ord("b")], finish, LOGPROB)
    assert deltas == ([] if finish == FINISH_STOP else [Text("b", LOGPROB, 2)])
