"""Streams and whole answers say the same, whatever pieces the tokens come in."""

from __future__ import annotations

import pytest
from openai import OpenAI

from tests.support.frontend import Script, request_http
from transport.ids import RequestId
from transport.messages.generate import Cancel, RequestFailed
from transport.messages.to_router import Submit
from transport.telemetry import catalog

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
TEXT = "Grüße aus 北京, 🌍!"


def failure(status: int = 429, retry_after: int | None = 7) -> RequestFailed:
    return RequestFailed(RequestId(""), status, "queue_full", "Too many.", None, retry_after)


def streamed_text(answer, index: int = 0) -> str:
    choices = [c for e in answer.events for c in e["choices"] if c["index"] == index]
    return "".join(c["delta"].get("content") or "" if "delta" in c else c["text"] for c in choices)


def finish_reasons(answer, index: int = 0) -> list[str]:
    choices = [c for e in answer.events for c in e["choices"] if c["index"] == index]
    return [c["finish_reason"] for c in choices if c["finish_reason"]]


@pytest.mark.parametrize("per_row", [1, 2, 3, 100])
@pytest.mark.parametrize("stop", [None, ["aus", "北京"], ["京, 🌍!x", "e a"], ["zzz"]])
def test_chat_stream_equals_whole_answer(serve, per_row, stop):
    server = serve(Script(per_row=per_row))
    body = {"messages": MESSAGES, "stop": stop}
    whole = request_http(server, "POST", CHAT, body).json
    stream = request_http(server, "POST", CHAT, {**body, "stream": True})
    expected = (
        TEXT if stop in (None, ["zzz"]) else TEXT[: TEXT.index(stop[0 if "aus" in stop else 1])]
    )
    assert whole["choices"][0]["message"]["content"] == expected
    assert streamed_text(stream) == expected
    assert finish_reasons(stream) == ["stop"] == [whole["choices"][0]["finish_reason"]]
    assert stream.events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_every_token_has_its_event(serve):
    server = serve(Script(text="abcdef", per_row=3))
    stream = request_http(server, "POST", CHAT, {"messages": MESSAGES, "stream": True})
    texts = [e["choices"][0]["delta"].get("content") for e in stream.events]
    assert texts == ["", *"abcdef", None]


def test_usage_counts_tokens_not_text(serve):
    server = serve(Script(text="🌍ab", cached=2))
    body = {"prompt": "abcd", "stop": "b", "max_tokens": 50}
    whole = request_http(server, "POST", COMPLETIONS, body).json
    assert whole["choices"][0]["text"] == "🌍a"
    assert whole["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 6,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    no_stop = request_http(server, "POST", COMPLETIONS, {**body, "stop": None}).json
    assert no_stop["usage"]["completion_tokens"] == 7, "the end-of-sequence token counts"
    options = {"stream": True, "stream_options": {"include_usage": True}}
    last = request_http(server, "POST", COMPLETIONS, {**body, **options}).events[-1]
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    options["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    events = request_http(server, "POST", COMPLETIONS, {**body, **options}).events
    assert [e["usage"]["completion_tokens"] for e in events] == [4, 5, 6, 6]


def test_the_first_token_is_measured_apart_from_the_others(serve):
    server = serve(Script(text="abc", per_row=2))
    assert request_http(server, "POST", CHAT, {"messages": MESSAGES, "n": 2}).status == 200
    found = server.metrics.read_histograms()
    ((_, first),), ((_, later),) = (
        found[metric.name]
        for metric in (catalog.TIME_TO_FIRST_TOKEN_SECONDS, catalog.INTER_TOKEN_LATENCY_SECONDS)
    )
    assert (sum(first.counts), sum(later.counts)) == (2, 4)


def test_no_usage_unless_asked(serve):
    stream = request_http(serve(), "POST", CHAT, {"messages": MESSAGES, "stream": True})
    assert all("usage" not in e and e["choices"] for e in stream.events)


def test_length_limit(serve):
    server = serve()
    whole = request_http(server, "POST", CHAT, {"messages": MESSAGES, "max_tokens": 2}).json
    assert whole["choices"][0]["message"]["content"] == "Gr"
    assert whole["choices"][0]["finish_reason"] == "length"


def test_several_choices_and_prompts(serve):
    server = serve(lambda submit, payload: Script(payload.decode() + "!", cached=len(payload)))
    body = {"prompt": ["a", "bc"], "n": 2, "echo": True}
    whole = request_http(server, "POST", COMPLETIONS, body).json
    assert [c["text"] for c in whole["choices"]] == ["aa!", "aa!", "bcbc!", "bcbc!"]
    assert whole["usage"]["prompt_tokens"] == 3
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    stream = request_http(server, "POST", COMPLETIONS, {**body, "stream": True})
    assert [streamed_text(stream, i) for i in range(4)] == ["aa!", "aa!", "bcbc!", "bcbc!"]
    assert [finish_reasons(stream, i) for i in range(4)] == [["stop"]] * 4


def test_chat_logprobs(serve):
    server = serve(Script(text="Aé"))
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    whole = request_http(server, "POST", CHAT, body).json["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in whole] == [[65], [0xC3], [0xA9]]
    assert whole[0]["logprob"] == pytest.approx(-0.65)
    assert [top["logprob"] for top in whole[0]["top_logprobs"]] == [-0.5, -1.5]
    stream = request_http(server, "POST", CHAT, {**body, "stream": True})
    entries = [
        entry
        for event in stream.events
        for choice in event["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert entries == whole


def test_completion_logprobs(serve):
    server = serve(Script(text="ab"))
    body = {"prompt": "x", "logprobs": 1}
    logprobs = request_http(server, "POST", COMPLETIONS, body).json["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b"]
    assert logprobs["text_offset"] == [0, 1]
    assert logprobs["top_logprobs"] == [{"\x00": -0.5}] * 2
    assert logprobs["token_logprobs"] == pytest.approx([-0.97, -0.98])


def streamed_logprobs(answer, field: str) -> list:
    choices = [choice for event in answer.events for choice in event["choices"]]
    return [value for c in choices if c["logprobs"] for value in c["logprobs"][field]]


@pytest.mark.parametrize("stop", ["zzz", "bcde", "cdX", "é!"])
def test_offsets_count_text_that_a_stop_string_holds_back(serve, stop):
    server = serve(Script(text="abcdé"))
    body = {"prompt": "x", "logprobs": 0, "stop": stop}
    whole = request_http(server, "POST", COMPLETIONS, body).json["choices"][0]
    assert whole["text"] == "abcdé"
    assert whole["logprobs"]["text_offset"] == [0, 1, 2, 3, 4, 4]  # é has two tokens here
    stream = request_http(server, "POST", COMPLETIONS, {**body, "stream": True})
    assert streamed_logprobs(stream, "text_offset") == [0, 1, 2, 3, 4, 4]


def test_tokens_that_are_no_whole_characters_keep_apart(serve):
    server = serve(Script(tokens=[65, 0xC3, 0xA9]))
    server.call(lambda: setattr(server.router, "top_ids", [0x94, 0x41, 0xE2]))
    body = {"prompt": "x", "logprobs": 3}
    logprobs = request_http(server, "POST", COMPLETIONS, body).json["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["A", "bytes:\\xc3", "bytes:\\xa9"]
    wanted = {"bytes:\\x94": -0.5, "A": -1.5, "bytes:\\xe2": -2.5}
    assert logprobs["top_logprobs"] == [wanted] * 3


def test_logprobs_of_no_token_are_empty_lists(serve):
    server = serve(Script(text=""))
    body = {"messages": MESSAGES, "logprobs": True}
    choice = request_http(server, "POST", CHAT, body).json["choices"][0]
    assert (choice["message"]["content"], choice["logprobs"]["content"]) == ("", [])
    choice = request_http(server, "POST", CHAT, {**body, "logprobs": False}).json["choices"][0]
    assert choice["logprobs"] is None
    body = {"prompt": "x", "logprobs": 1}
    choice = request_http(server, "POST", COMPLETIONS, body).json["choices"][0]
    assert set(choice["logprobs"]) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert list(choice["logprobs"].values()) == [[]] * 4
    choice = request_http(server, "POST", COMPLETIONS, {"prompt": "x"}).json["choices"][0]
    assert choice["logprobs"] is None


@pytest.mark.parametrize("per_row", [1, 100])
@pytest.mark.parametrize(
    ("stop", "min_tokens", "shown", "tokens"),
    [
        (["b"], 0, "aX", 3),
        (["b"], 2, "aX", 3),
        (["b"], 3, "aXbaX", 6),
        (["ba"], 3, "aX", 4),  # begins within the first three, ends behind them
        (["ba", "Xa"], 4, "aXbaXb", 8),
        (["X"], 9, "aXbaXbXaX", 10),
    ],
)
def test_stop_strings_wait_for_the_least_number_of_tokens(
    serve, per_row, stop, min_tokens, shown, tokens
):
    server = serve(Script(text="aXbaXbXaX", per_row=per_row))
    body = {"prompt": "x", "stop": stop, "min_tokens": min_tokens}
    answer = request_http(server, "POST", COMPLETIONS, body).json
    assert answer["choices"][0]["text"] == shown
    assert answer["usage"]["completion_tokens"] == tokens
    stream = request_http(server, "POST", COMPLETIONS, {**body, "stream": True})
    assert streamed_text(stream) == shown


@pytest.mark.parametrize("stream", [False, True])
def test_early_errors_are_plain_answers(serve, stream):
    server = serve(Script(error=failure()))
    answer = request_http(server, "POST", CHAT, {"messages": MESSAGES, "stream": stream})
    assert answer.status == 429
    assert answer.headers["retry-after"] == "7"
    assert answer.json["error"]["code"] == "queue_full"
    assert answer.json["error"]["type"] == "rate_limit_error"


def test_late_errors_end_the_stream_with_an_event(serve):
    server = serve(Script(error=failure(500, None), error_after=2))
    stream = request_http(server, "POST", CHAT, {"messages": MESSAGES, "stream": True})
    assert stream.status == 200
    assert stream.events[-1]["error"]["message"] == "Too many."
    whole = request_http(server, "POST", CHAT, {"messages": MESSAGES})
    assert whole.status == 500


def test_one_failed_prompt_cancels_the_others(serve):
    def script(submit: Submit, payload: bytes):
        bad = payload == b"bad"
        return Script(error=failure(400, None) if bad else None, hang_after=None if bad else 1)

    server = serve(script)
    answer = request_http(server, "POST", COMPLETIONS, {"prompt": ["good", "bad"]})
    assert answer.status == 400
    assert len(server.router.of_kind(Cancel)) == 1
    assert not server.services.router.live


def test_a_stop_string_stops_the_choice_at_the_router(serve):
    server = serve(Script(delay=0.01))
    request_http(server, "POST", CHAT, {"messages": MESSAGES, "stop": "ü", "n": 2})
    assert {(c.index, c.cause) for c in server.router.of_kind(Cancel)} == {(0, "stop"), (1, "stop")}
    assert len(server.router.of_kind(Cancel)) == 2


def test_line_ends_of_unicode_do_not_split_events(serve):
    text = "a\u2028b\u2029c\u0085d\r\ne"
    server = serve(Script(text=text, per_row=100))
    stream = request_http(server, "POST", CHAT, {"messages": MESSAGES, "stream": True})
    assert streamed_text(stream) == text
    lines = stream.body.decode().splitlines()
    assert all(line.startswith("data: ") for line in lines if line)


def test_silent_streams_are_kept_alive(serve, monkeypatch):
    monkeypatch.setattr("frontend.http.stream_buffer.KEEP_ALIVE_SECONDS", 0.1)
    server = serve(Script(text="a", error=failure(), error_after=1, delay=0.5))
    stream = request_http(server, "POST", CHAT, {"messages": MESSAGES, "stream": True})
    assert b"\n\n: keep-alive\n\n" in stream.body


def test_official_client(serve):
    server = serve()
    client = OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(model="test-model", messages=MESSAGES, seed=1)
    assert answer.choices[0].message.content == TEXT
    stream = client.chat.completions.create(
        model="test-model", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert chunks[-1].usage.total_tokens == answer.usage.total_tokens
    assert client.completions.create(model="test-model", prompt="x", max_tokens=3).usage
    assert [model.id for model in client.models.list()] == ["test-model"]
    assert client.models.retrieve("test-model").max_model_len == 4096
