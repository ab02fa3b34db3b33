"""Large bodies are read by a process of their own, as they would be here."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import threading

import pytest

from frontend.api import tokenize
from frontend.api.openai_chat import CHAT
from frontend.api.openai_completions import COMPLETIONS
from frontend.api.tokenize import DETOKENIZE, TOKENIZE
from frontend.errors import ApiError
from frontend.generation.request import ModelLimits
from frontend.http import json_body
from frontend.http.body_budget import BodyShare
from frontend.links import body_reader
from frontend.links.body_reader import BodyReader
from tests.support.frontend import frontend_settings, request_http
from tests.support.waiting import eventually
from transport.messages.to_router import Submit

LIMITS = ModelLimits("served", 1000, 4096, 8)
USER = {"role": "user", "content": "Grüße\x00"}
GOOD = b'{"prompt": "Hi", "seed": 1}'


def read_all(*errands, during=None) -> list[object]:
    """What a reader makes of (form, body), or the error; `during(reader)` runs beside it."""

    async def run() -> list[object]:
        reader = BodyReader(frontend_settings().process)
        try:
            tasks = [asyncio.ensure_future(reader.read(*errand, LIMITS)) for errand in errands]
            if during is not None:
                await during(reader, tasks)
            return await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            await reader.close()

    return asyncio.run(run())


def test_a_body_is_read_as_it_would_be_here():
    errands = [
        (form, json.dumps(body).encode())
        for form, body in [
            (CHAT.form, {"messages": [USER], "seed": 1, "stop": "x", "logit_bias": {"5": 1}}),
            (CHAT.form, {"messages": [USER], "seed": 1, "n": 2, "stream": True, "top_p": 0.5}),
            (COMPLETIONS.form, {"prompt": ["a", "b"], "seed": 1, "echo": True}),
            (COMPLETIONS.form, {"prompt": [[1, 2], [3]], "seed": 1, "echo": True}),
            (TOKENIZE, {"messages": [USER]}),
            (TOKENIZE, {"content": "é", "add_special_tokens": False}),
            (DETOKENIZE, {"tokens": [1, 2, 3]}),
        ]
    ]
    assert read_all(*errands) == [form.read(body, LIMITS) for form, body in errands]


@pytest.mark.parametrize("body", [b"[", b"{}", b'{"model": "other", "prompt": ""}', b"\xff"])
def test_a_body_is_refused_as_it_would_be_here(body):
    [error] = read_all((COMPLETIONS.form, body))
    with pytest.raises(ApiError) as here:
        COMPLETIONS.form.read(body, LIMITS)
    assert (error.status, error.value()) == (here.value.status, here.value.value())


def test_a_caller_that_leaves_takes_no_other_ones_answer():
    async def leave(reader, tasks):
        while reader._short.process is None:  # noqa: ASYNC110 nobody announces it
            await asyncio.sleep(0)
        tasks[0].cancel()  # is being read
        tasks[1].cancel()  # waits

    tokens = [(DETOKENIZE, b'{"tokens": [%d]}' % number) for number in range(3)]
    first, second, third = read_all(*tokens, during=leave)
    assert isinstance(first, asyncio.CancelledError)
    assert isinstance(second, asyncio.CancelledError)
    assert third == [2]


def test_a_body_of_ordinary_size_does_not_wait_for_a_huge_one():
    async def hold_up(reader, tasks):
        while reader._long.process is None:  # noqa: ASYNC110 nobody announces it
            await asyncio.sleep(0)
        pid = reader._long.process._popen.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            assert await tasks[1] == COMPLETIONS.form.read(GOOD, LIMITS)
            assert not tasks[0].done()
        finally:
            os.kill(pid, signal.SIGCONT)

    huge = GOOD + b" " * body_reader.SHORT_BYTES
    assert (
        read_all((COMPLETIONS.form, huge), (COMPLETIONS.form, GOOD), during=hold_up)
        == [COMPLETIONS.form.read(GOOD, LIMITS)] * 2
    )


def test_the_process_gives_way_to_those_that_serve_everybody():
    niceness = []

    async def look(reader, tasks):
        await asyncio.wait(tasks)
        niceness.append(os.getpriority(os.PRIO_PROCESS, reader._short.process._popen.pid))

    read_all((DETOKENIZE, b'{"tokens": [1]}'), during=look)
    assert niceness[0] > os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_process_costs_one_request(monkeypatch, fate):
    monkeypatch.setattr(body_reader, "READ_SECONDS", 2.0)
    monkeypatch.setattr(body_reader, "END_SECONDS", 0.1)

    async def lose(reader, tasks):
        while reader._short.process is None:  # noqa: ASYNC110 nobody announces it
            await asyncio.sleep(0)
        os.kill(reader._short.process._popen.pid, fate)
        monkeypatch.setattr(body_reader, "READ_SECONDS", 30.0)

    lost, served = read_all((COMPLETIONS.form, GOOD), (COMPLETIONS.form, GOOD), during=lose)
    assert (lost.status, lost.retry_after) == (503, 1)
    assert served == COMPLETIONS.form.read(GOOD, LIMITS)


def test_a_large_body_is_not_read_on_the_event_loop(serve, monkeypatch):
    def check(body: bytes) -> None:
        assert len(body) < 100_000, "read on the event loop"

    monkeypatch.setattr(json_body, "check_bounds", check)
    server = serve()
    body = {"messages": [USER], "metadata": {"a": "a" * 100_000}}
    assert request_http(server, "POST", "/v1/chat/completions", body).status == 200
    assert len(server.router.of_kind(Submit)) == 1
    answer = request_http(server, "POST", "/detokenize", {"tokens": [65] * 50_000})
    assert answer.json["error"]["code"] == "context_length_exceeded"
    assert server.services.bodies.held == 0


def test_a_refused_body_is_not_kept(serve):
    """No cycle of references holds it until somebody looks for cycles."""
    server = serve()
    gc.collect()
    gc.disable()
    try:
        body = b'{"messages": [], "user": "%s"}' % (b"a" * 200_000)
        assert request_http(server, "POST", "/v1/chat/completions", body).status == 400
        eventually(lambda: not any(type(part) is BodyShare for part in gc.get_objects()))
    finally:
        gc.enable()


def test_ids_become_text_beside_the_event_loop(serve, monkeypatch):
    server = serve()
    threads = []

    def decode(ids) -> str:
        threads.append(threading.get_ident())
        return "text"

    monkeypatch.setattr(server.services.texts, "decode", decode, raising=False)
    body = {"prompt": [[65], [66]], "echo": True, "max_tokens": 1}
    answer = request_http(server, "POST", "/v1/completions", body)
    assert [choice["text"][:4] for choice in answer.json["choices"]] == ["text", "text"]
    assert request_http(server, "POST", "/detokenize", {"tokens": [65]}).json["prompt"] == "text"
    assert len(threads) == 3
    assert server.call(threading.get_ident) not in threads


def test_many_ids_of_a_text_are_all_answered(serve, monkeypatch):
    monkeypatch.setattr(tokenize, "IDS_PER_TURN", 1000)
    text = "ab" * 2000
    answer = request_http(serve(), "POST", "/tokenize", {"prompt": text}).json
    assert answer["tokens"] == list(text.encode())
    assert answer["count"] == 4000
