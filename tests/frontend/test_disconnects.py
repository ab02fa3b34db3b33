"""Clients that leave, and clients that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct

import pytest

from frontend.http.stream_buffer import StreamBuffer
from tests.support.frontend import Script, request_http
from tests.support.waiting import eventually
from transport.messages.generate import Cancel, Throttle
from transport.messages.to_router import Submit

CHAT = "/v1/chat/completions"


def open_request(server, *, stream: bool, receive_buffer: int | None = None, **fields):
    """A connection on which a chat request has been sent."""
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(20)
    connection.connect(("127.0.0.1", server.port))
    body = json.dumps(
        {"messages": [{"role": "user", "content": "Hi"}], "stream": stream, **fields}
    ).encode()
    connection.sendall(
        b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body
    )
    return connection


def leave(connection: socket.socket, how: str) -> None:
    if how == "half close first":
        connection.shutdown(socket.SHUT_WR)
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("how", ["close", "reset", "half close first"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("hang_after", [0, 3])
def test_leaving_cancels_once(serve, how, stream, hang_after):
    server = serve(Script(text="abcdefgh", hang_after=hang_after))
    for _ in range(3):
        submits = len(server.router.of_kind(Submit)) + 1
        connection = open_request(server, stream=stream)
        eventually(lambda n=submits: len(server.router.of_kind(Submit)) == n)
        if stream and hang_after:
            assert connection.recv(10)
        leave(connection, how)
        eventually(lambda: not server.services.jobs)
        connection.close()
    cancels = server.router.of_kind(Cancel)
    assert [(c.request_id, c.cause) for c in cancels] == [
        (s.request_id, "client") for s in server.router.of_kind(Submit)
    ]
    assert not server.services.streams
    assert not server.services.router.live


def test_leaving_is_noticed_while_another_request_waits_on_the_connection(serve):
    server = serve(Script(hang_after=1))
    connection = open_request(server, stream=False)
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    eventually(lambda: len(server.router.of_kind(Submit)) == 1)
    connection.close()
    eventually(lambda: len(server.router.of_kind(Cancel)) == 1)
    eventually(lambda: not server.services.jobs)


def test_finished_requests_are_not_cancelled(serve):
    server = serve()
    for stream in (True, False) * 3:
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": stream}
        assert request_http(server, "POST", CHAT, body).status == 200
    eventually(lambda: not server.services.jobs)
    assert server.router.of_kind(Cancel) == []


def test_nothing_is_submitted_for_half_a_body(serve):
    server = serve()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(
            b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n{" % CHAT.encode()
        )
    eventually(lambda: not server._server.connections)
    assert server.router.of_kind(Submit) == []


def test_a_slow_reader_pauses_its_sequence_and_then_gets_all(serve):
    text = "x" * 4000
    server = serve(Script(text=text, per_row=20, delay=0.0005), stream_high_water_bytes=20_000)
    connection = open_request(server, stream=True, receive_buffer=4096)
    eventually(lambda: any(t.paused for t in server.router.of_kind(Throttle)), 20)
    received = b""
    while b"[DONE]" not in received:
        received += connection.recv(65536)
    connection.close()
    throttles = [t.paused for t in server.router.of_kind(Throttle)]
    assert throttles[:2] == [True, False]
    assert received.count(b'"content":"x"') == len(text)


@pytest.mark.parametrize("is_taken", [False, True])
def test_an_unread_stream_is_given_up_after_its_time_and_no_sooner(monkeypatch, is_taken):
    """Whether it waits here or, once it is taken, in the connection."""

    async def run() -> list[bool]:
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: 100.0)
        buffer = StreamBuffer(10, lambda paused: None, 90.0)
        buffer.append(b"more than ten bytes")
        if is_taken:
            await buffer.take()
        return [buffer.tick(now, 60.0) for now in (100.0, 159.0, 160.0, 161.0)]

    assert asyncio.run(run()) == [False, False, False, True]


def test_a_client_that_never_reads_is_cut_off(serve):
    server = serve(
        Script(text="x" * 40_000, per_row=20, delay=0.0005),
        stream_high_water_bytes=20_000,
        slow_reader_seconds=0.5,
    )
    connection = open_request(server, stream=True, receive_buffer=4096)
    eventually(lambda: not server.services.jobs and server.router.of_kind(Cancel), 20)
    kinds = [type(m) for m in server.router.sent if isinstance(m, Throttle | Cancel)]
    assert kinds[0] is Throttle
    assert [c.cause for c in server.router.of_kind(Cancel)] == ["slow_reader"]
    assert not server.services.streams
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            received += piece
    connection.close()
    assert b"[DONE]" not in received
