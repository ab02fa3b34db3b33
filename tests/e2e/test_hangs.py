"""A process that is stopped, not dead: noticed, replaced, and nobody loses an answer."""

from __future__ import annotations

import json
import os
import signal
import socket

import pytest

from tests.support.waiting import eventually

BODY = {"prompt": "hello hello", "max_tokens": 300, "temperature": 0.9, "seed": 11,
        "ignore_eos": True}  # fmt: skip
SECONDS = 90.0
"""Deadline of every wait."""
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server(serve):
    with serve(hang_seconds=2, frontends=2, kv_cache_gb=0.01) as server:
        server.ready()
        yield server


def wait_ready(server, wanted: bool, seconds: float = SECONDS) -> None:
    eventually(
        lambda: (server.ask("status")["state"] == "ready") is wanted,
        seconds,
        f"ready is {wanted}",
    )


@pytest.mark.parametrize("name", ["worker/0", "tokenizer/0"])
def test_a_stopped_process_is_replaced_and_answers_go_on(server, within, name):
    undisturbed = server.post("/v1/completions", BODY, JSON).json["choices"][0]["text"]
    pid = server.pids()[name]
    pieces = []
    with server.stream("/v1/completions", BODY) as stream:
        for piece in stream.pieces():
            pieces.append(piece)
            if len(pieces) == 5:
                os.kill(pid, signal.SIGSTOP)
                # Until it is replaced and has loaded, long after it was found silent.
                eventually(lambda: server.get("/ready").status == 503, within(2.0), "not ready")
                assert server.get("/health").status == 200
    assert "".join(pieces) == undisturbed
    wait_ready(server, wanted=True)
    assert server.pids()[name] != pid
    assert server.post("/v1/completions", BODY, JSON).json["choices"][0]["text"] == undisturbed


def test_a_process_that_goes_on_in_time_is_kept(serve, within):
    with serve(engine="fake", hang_seconds=120) as server:
        server.ready()
        pid = server.pids()["worker/0"]
        os.kill(pid, signal.SIGSTOP)
        wait_ready(server, wanted=False, seconds=within(1.0))
        os.kill(pid, signal.SIGCONT)
        wait_ready(server, wanted=True)
        assert server.pids()["worker/0"] == pid


def test_a_stopped_router_is_replaced_and_requests_in_flight_get_an_error(server):
    wait_ready(server, wanted=True)
    pid = server.pids()["router"]
    errors = []
    with server.stream("/v1/completions", {**BODY, "max_tokens": 1500}) as stream:
        for number, event in enumerate(stream.events()):
            if number == 3:
                os.kill(pid, signal.SIGSTOP)
            if "error" in event:
                errors.append(event["error"])
    assert errors and "router" in errors[0]["message"].lower()
    wait_ready(server, wanted=True)
    assert server.pids()["router"] != pid
    assert server.post("/v1/completions", BODY, JSON).status == 200


def test_a_stopped_frontend_is_replaced(server):
    wait_ready(server, wanted=True)
    pid = server.pids()["frontend/1"]
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: server.pids()["frontend/1"] not in (pid, None), SECONDS, "a new frontend")
    wait_ready(server, wanted=True)
    assert [server.post("/v1/completions", BODY, JSON).status for _ in range(4)] == [200] * 4


def test_an_answer_waits_for_a_worker_that_loads_for_longer_than_a_stage_may_take(serve):
    body = {"prompt": "hello", "max_tokens": 300, "ignore_eos": True}
    with serve(engine="fake", fake_step_ms=5, stage_timeout=2) as server:
        server.ready()
        wanted = server.post("/v1/completions", body, JSON).json["choices"][0]["text"]
        old = server.pids()["worker/0"]
        with server.stream("/v1/completions", body) as stream:
            pieces = stream.pieces()
            text = next(pieces)
            os.kill(old, signal.SIGKILL)
            eventually(lambda: server.pids()["worker/0"] not in (old, None), SECONDS, "a new one")
            new = server.pids()["worker/0"]
            os.kill(new, signal.SIGSTOP)  # it takes its time
            eventually(lambda: server.ask("requests")[0]["stage_ms"] > 3000, SECONDS, "a long wait")
            os.kill(new, signal.SIGCONT)
            text += "".join(pieces)
        assert text == wanted


@pytest.mark.slow
def test_a_slow_reader_is_held_back_after_the_loss_of_its_worker_as_well(serve):
    """Else all that is left of its answer would pile up in the frontend."""
    wanted = 6000
    body = {"prompt": "hello", "max_tokens": 1000, "ignore_eos": True}
    # More bytes than the kernel keeps for a connection that nobody reads.
    large = {**body, "stream": True, "max_tokens": wanted, "n": 2, "logprobs": 5}
    with serve(engine="fake", fake_step_ms=1, stream_high_water_kib=8) as server:
        server.ready()

        def tokens() -> int:
            return server.ask("requests")[0]["output_tokens"]  # the oldest one first

        def stands_still() -> bool:
            before = tokens()
            server.post("/v1/completions", body)
            return 0 < before == tokens() < 2 * wanted

        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(server.address)
            data = json.dumps(large).encode()
            slow.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(data) + data
            )
            eventually(lambda: len(server.ask("requests")) == 1, SECONDS, "the request is there")
            eventually(stands_still, SECONDS, "the slow answer is paused")
            pid = server.pids()["worker/0"]
            os.kill(pid, signal.SIGKILL)
            eventually(lambda: server.pids()["worker/0"] not in (pid, None), SECONDS, "a new one")
            wait_ready(server, wanted=True)
            eventually(stands_still, SECONDS, "it is paused again")  # else it runs to its end
            received = b""
            while piece := slow.recv(65536):
                received += piece
        assert received.count(b'"token_logprobs"') == 2 * wanted
        assert b"[DONE]" in received
