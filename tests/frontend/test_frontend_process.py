"""The real process against a router and a daemon made of two sockets."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from frontend.gate import INFORMED_SECONDS
from frontend.settings import FrontendSettings
from frontend.tokenizer.load import load_tokenizer
from tests.support.waiting import eventually
from transport.child import ProcessSettings
from transport.framing import token_frame
from transport.ids import ProcessName
from transport.messages.base import Hello, Message, Welcome
from transport.messages.from_daemon import Answer, Drain, InstanceStatus
from transport.messages.generate import (
    FINISH_LENGTH,
    RUNNING,
    Cancel,
    ModelInfo,
    StageTimes,
    TokenBatch,
)
from transport.messages.to_daemon import TO_DAEMON, Query, StateChanged, StatusHeld
from transport.messages.to_frontend import Finished, Serving
from transport.messages.to_router import TO_ROUTER, Submit
from transport.sockets import Endpoints, Received, RouterSocket

NAME = ProcessName("frontend/0")
SERVING = Serving(ModelInfo(49152, 2048, (2,), 10_000))
BODY = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}


class Peers:
    """Router and daemon: one thread that owns both sockets."""

    def __init__(self, run_dir: Path, is_told: bool) -> None:
        self.endpoints = Endpoints(str(run_dir))
        self.context = zmq.Context()
        self.seen: list[Message] = []
        self.ids: list[int] = []
        self.hang = False
        self.has_model = True
        self.is_told = is_told
        self.commands: list[Message | str] = []
        self.router_context = zmq.Context()
        self.router = RouterSocket(self.router_context, self.endpoints.router, TO_ROUTER)
        self.daemon = RouterSocket(self.context, self.endpoints.control, TO_DAEMON)
        self.closing = False
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def of_kind(self, kind):
        return [message for message in self.seen if isinstance(message, kind)]

    def close(self) -> None:
        self.closing = True
        self.thread.join(10)
        self.router.close()
        self.daemon.close()
        self.context.destroy(linger=0)
        self.router_context.destroy(linger=0)

    def _run(self) -> None:
        while not self.closing:
            for received in self.router.drain():
                self._on_router(received)
            for received in self.daemon.drain():
                self._on_daemon(received)
            while self.commands:
                command = self.commands.pop(0)
                if command == "restart":
                    # Ending the context makes sure that the old socket's file is gone.
                    self.router_context.destroy(linger=0)
                    self.router_context = zmq.Context()
                    self.router = RouterSocket(
                        self.router_context, self.endpoints.router, TO_ROUTER
                    )
                elif isinstance(command, Serving):
                    self.router.send(NAME, command)
                else:
                    self.daemon.send(NAME, command)
            time.sleep(0.002)

    def _on_router(self, received: Received) -> None:
        self.seen.append(received.message)
        match received.message:
            case Hello():
                self.router.send(NAME, Welcome())
                if self.has_model:
                    self.router.send(NAME, SERVING)
            case Submit(request_id):
                ids = self.ids[:1] if self.hang else self.ids
                for step, token in enumerate(ids):
                    is_last = step == len(self.ids) - 1
                    self.router.send(
                        NAME,
                        TokenBatch(
                            NAME, step, [request_id], [0], [1],
                            [FINISH_LENGTH if is_last else RUNNING], [],
                            [] if step else [(request_id, 0, 3, 9)],
                        ),
                        token_frame([token]),
                    )  # fmt: skip
                if not self.hang:
                    self.router.send(NAME, Finished(request_id, StageTimes(), 0))

    def _on_daemon(self, received: Received) -> None:
        self.seen.append(received.message)
        match received.message:
            case Hello():
                self.daemon.send(NAME, Welcome())
                if self.is_told:
                    self.daemon.send(NAME, InstanceStatus("ready", serial=1))
            case Query(what, serial):
                self.daemon.send(NAME, Answer(serial), f"about {what}".encode())


class Running:
    def __init__(self, peers: Peers, process: subprocess.Popen, port: int) -> None:
        self.peers, self.process, self.port = peers, process, port

    def request(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        result = answer.status, answer.read()
        connection.close()
        return result

    def wait_for(self, condition: Callable[[], object]) -> None:
        def check() -> object:
            assert self.process.poll() is None, "the process ended"
            return condition()

        eventually(check)

    def wait_ready(self) -> None:
        self.wait_for(lambda: self.request("GET", "/ready")[0] == 200)


@pytest.fixture
def running(tmp_path: Path, smollm2_dir: Path, request: pytest.FixtureRequest) -> Iterator[Running]:
    """A frontend; with the parameter False the daemon does not tell it how things are."""
    run_dir = tmp_path / "r"
    run_dir.mkdir()
    peers = Peers(run_dir, getattr(request, "param", True))
    peers.ids = load_tokenizer(smollm2_dir).tokenizer.encode("The sky is blue 🌍").ids
    listener = socket.create_server(("127.0.0.1", 0))
    settings = FrontendSettings(
        process=ProcessSettings(NAME, "frontend", "test", str(run_dir), os.getpid(), "hash"),
        listen_fd=listener.fileno(), model_dir=str(smollm2_dir), model_name="m",
        host="127.0.0.1", cors_origin=(),
        max_body_bytes=1 << 20, body_buffer_bytes=1 << 20, max_header_bytes=32_768, body_seconds=5.0,
        keep_alive_seconds=900, max_choices=8, stream_high_water_bytes=1 << 20,
        slow_reader_seconds=30.0, retry_after_seconds=1, drain_seconds=1.0,
    )  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "frontend.run"],
        stdin=subprocess.PIPE,
        pass_fds=[listener.fileno()],
        cwd=Path(__file__).parents[2],
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(settings) + b"\n")
    process.stdin.flush()
    result = Running(peers, process, listener.getsockname()[1])
    try:
        yield result
    finally:
        process.stdin.close()
        process.wait(10)
        listener.close()
        peers.close()


def test_serves_drains_and_stops(running):
    running.wait_ready()
    status, body = running.request("POST", "/v1/chat/completions", BODY)
    answer = json.loads(body)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "The sky is blue 🌍")
    assert answer["usage"]["prompt_tokens"] == 9
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert running.request("GET", "/metrics") == (200, b"about metrics")
    status, stream = running.request("POST", "/v1/chat/completions", {**BODY, "stream": True})
    assert stream.endswith(b"data: [DONE]\n\n")

    running.peers.hang = True
    answers: list[tuple[int, bytes]] = []
    body = {**BODY, "stream": True}
    client = threading.Thread(
        target=lambda: answers.append(running.request("POST", "/v1/chat/completions", body))
    )
    client.start()
    running.wait_for(lambda: len(running.peers.of_kind(Submit)) == 3)
    running.peers.commands.append(Drain())
    running.wait_for(lambda: running.request("GET", "/ready")[0] == 503)
    assert running.request("POST", "/v1/chat/completions", BODY)[0] == 503
    assert running.request("GET", "/health")[0] == 200
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(20) == 0
    client.join(10)
    assert b'"error"' in answers[0][1]
    assert answers[0][1].endswith(b"data: [DONE]\n\n")
    assert [c.cause for c in running.peers.of_kind(Cancel)] == ["shutdown"]
    states = [message.state for message in running.peers.of_kind(StateChanged)]
    assert states == ["ready", "draining"]


def test_a_router_that_restarts_is_greeted_again(running):
    running.wait_ready()
    running.peers.hang = True
    answers: list[tuple[int, bytes]] = []
    client = threading.Thread(
        target=lambda: answers.append(running.request("POST", "/v1/chat/completions", BODY))
    )
    client.start()
    running.wait_for(lambda: len(running.peers.of_kind(Submit)) == 1)
    running.peers.commands.append("restart")
    client.join(20)
    assert answers[0][0] == 503
    running.wait_for(lambda: len(running.peers.of_kind(Hello)) == 3)
    running.wait_ready()
    running.peers.hang = False
    assert running.request("POST", "/v1/chat/completions", BODY)[0] == 200


def test_it_confirms_that_it_lets_requests_in_when_it_does(running):
    peers = running.peers
    running.wait_for(lambda: StatusHeld(1) in peers.seen)
    assert running.request("GET", "/ready")[0] == 200  # the first question, and at once

    peers.has_model = False
    peers.commands.append("restart")
    running.wait_for(lambda: len(peers.of_kind(Hello)) == 3)
    peers.commands.append(InstanceStatus("degraded", "the router is new", 2))
    peers.commands.append(InstanceStatus("ready", "", 3))
    # Questions to the daemon go the way of the confirmation: the first one's answer comes after the
    # news, so the second one would come after their confirmation.
    for _ in range(2):
        assert running.request("GET", "/metrics")[0] == 200
    assert peers.of_kind(StatusHeld) == [StatusHeld(1)]
    assert running.request("GET", "/ready")[0] == 503
    peers.commands.append(SERVING)
    running.wait_for(lambda: StatusHeld(3) in peers.seen)
    assert running.request("GET", "/ready")[0] == 200
    assert peers.of_kind(StatusHeld) == [StatusHeld(1), StatusHeld(3)]


@pytest.mark.parametrize("running", [False], indirect=True)
def test_one_that_does_not_know_how_things_are_leaves_clients_waiting_rather_than_refuse(running):
    """Another frontend on the same listener may serve them."""
    peers = running.peers
    answers: list[int] = []
    client = threading.Thread(target=lambda: answers.append(running.request("GET", "/ready")[0]))
    client.start()
    running.wait_for(lambda: StateChanged("ready") in peers.seen)
    client.join(INFORMED_SECONDS + 1)
    assert answers == []
    peers.commands.append(InstanceStatus("ready", serial=1))
    client.join(60)
    assert answers == [200]
