"""Prompts made to keep tokenizers busy, or whose clients have left, hold up nobody."""

from __future__ import annotations

import contextlib
import json
import socket

import psutil
import pytest

from tests.support.waiting import eventually

PROMPTS = 20
PROMPT = "a " * 1_500_000
ENDPOINTS = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 1},
    "/tokenize": {"prompt": PROMPT},
}
HONEST = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
SECONDS = 60.0


@pytest.mark.parametrize("path", ENDPOINTS)
def test_prompts_whose_clients_have_left_are_not_encoded(serve, path):
    data = json.dumps(ENDPOINTS[path]).encode()
    with serve(engine="fake", max_model_len=8_000_000) as server, contextlib.ExitStack() as stack:
        server.ready()
        tokenizer = psutil.Process(server.pids()["tokenizer/0"])
        for _ in range(PROMPTS):
            client = stack.enter_context(
                contextlib.closing(socket.create_connection(server.address))
            )
            client.sendall(
                b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n" % (path.encode(), len(data)) + data
            )
        eventually(lambda: server.ask("requests"), SECONDS, "the router has a prompt")
        assert server.post("/v1/chat/completions", HONEST).status == 200, "a short one passes them"
        stack.close()
        eventually(lambda: not server.ask("requests"), SECONDS, "none is left")
        eventually(lambda: not tokenizer.children(), SECONDS, "none is being encoded")
        assert server.post("/v1/chat/completions", HONEST).status == 200
        assert server.metric("tokenizer_prompts_total") < PROMPTS
