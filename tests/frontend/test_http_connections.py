"""What goes over one connection, byte by byte: where a request ends, and whose answer is cut by what."""

from __future__ import annotations

import json
import re
import socket

import pytest

from frontend.http import reply
from frontend.http import server as http_server
from tests.support.frontend import Script, ServedFrontend
from tests.support.waiting import eventually
from transport.messages.from_daemon import ApiKeys, InstanceStatus
from transport.messages.generate import Cancel
from transport.messages.to_router import Submit

CHAT = b"/v1/chat/completions"
JSON_TYPE = b"Content-Type: application/json"
UPGRADE = (
    b"Connection: Upgrade, HTTP2-Settings",
    b"Upgrade: h2c",
    b"HTTP2-Settings: AAEAAEAAAAIAAAAB",
)
SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: smuggled\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAST_HEALTH = HEALTH[:-2] + b"Connection: close\r\n\r\n"


def body_of(stream: bool = False) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": stream}).encode()


def head(*lines: bytes, method: bytes = b"POST", path: bytes = CHAT) -> bytes:
    top = b"%b %b HTTP/1.1" % (method, path)
    return b"\r\n".join((top, b"Host: localhost", JSON_TYPE, *lines)) + b"\r\n\r\n"


def chat(*lines: bytes, stream: bool = False) -> bytes:
    body = body_of(stream)
    return head(b"Content-Length: %d" % len(body), *lines) + body


def connect(server: ServedFrontend) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def read_all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    received = b""
    while mark not in received:
        piece = connection.recv(65536)
        assert piece, f"closed after {received!r}"
        received += piece
    return received


def statuses(answers: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answers)]


def framed(framing: str, body: bytes) -> tuple[bytes, bytes]:
    """The header that announces a body, and the body as it is sent."""
    if framing == "length":
        return b"Content-Length: %d" % len(body), body
    return b"Transfer-Encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


# ---- where a request ends ----


@pytest.mark.parametrize("pieces", ["one", "bytes"])
@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize(("method", "path"), [(b"POST", CHAT), (b"GET", b"/v1/models")])
def test_a_body_behind_a_wish_to_upgrade_is_no_request(serve, method, path, framing, pieces):
    line, body = framed(framing, SMUGGLED)
    data = head(*UPGRADE, line, method=method, path=path) + body + LAST_HEALTH
    with connect(serve()) as connection:
        if pieces == "one":
            connection.sendall(data)
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for byte in data:
                connection.sendall(bytes([byte]))
        answers = read_all(connection)
    assert statuses(answers) == [400 if method == b"POST" else 200, 200]
    assert b"smuggled" not in answers
    assert method == b"GET" or b"not valid JSON" in answers


@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_a_body_that_comes_later_than_the_wish_to_upgrade_is_no_request(serve, framing):
    line, body = framed(framing, SMUGGLED)
    with connect(serve()) as connection:
        connection.sendall(head(*UPGRADE, line, b"Expect: 100-continue"))
        assert statuses(read_until(connection, b"\r\n\r\n")) == [100]
        connection.sendall(body + LAST_HEALTH)
        assert statuses(read_all(connection)) == [400, 200]


@pytest.mark.parametrize("stream", [False, True])
def test_a_wish_to_upgrade_is_ignored(serve, stream):
    """Java's HttpClient asks for HTTP/2 with its first request."""
    server = serve()
    with connect(server) as connection:
        connection.sendall(HEALTH + chat(*UPGRADE, stream=stream) * 2 + LAST_HEALTH)
        answers = read_all(connection)
    assert statuses(answers) == [200] * 4
    assert answers.count(b"[DONE]") == 2 * stream
    assert len(server.router.of_kind(Submit)) == 2


def test_this_is_no_proxy(serve):
    with connect(serve()) as connection:
        connection.sendall(b"CONNECT host:443 HTTP/1.1\r\nHost: host:443\r\n\r\n" + HEALTH)
        assert statuses(read_all(connection)) == [400]


TOO_MUCH = {
    "one trailer": b"0\r\nX-Sum: " + b"a" * 600_000,
    "many trailers": b"0\r\n" + b"X-Sum: 1\r\n" * 4_000,
    "empty trailers": b"0\r\n" + b"a:\r\n" * 10_000,
    "one extension": b"5;x=" + b"a" * 600_000,
}


@pytest.mark.parametrize("how", TOO_MUCH)
@pytest.mark.parametrize("first", [b"", b"3\r\n   \r\n"], ids=["no body", "some body"])
def test_what_surrounds_a_chunked_body_is_bounded(serve, how, first):
    """It goes on forever: only the refusal ends it."""
    server = serve()
    with connect(server) as connection:
        connection.sendall(head(b"Transfer-Encoding: chunked") + first + TOO_MUCH[how])
        answer = read_all(connection)
    assert statuses(answer) == [431]
    assert b"trailers exceed 32768 bytes" in answer
    assert not server.router.of_kind(Submit)


def test_trailers_are_bounded_for_clients_without_a_key(serve):
    server = serve()
    keys = InstanceStatus("ready", keys=ApiKeys((b"secret",), ()))
    server.call(lambda: server.gate.take(keys))
    with connect(server) as connection:
        connection.sendall(head(b"Transfer-Encoding: chunked"))
        read_until(connection, b"invalid_api_key")  # the answer comes before the body
        with pytest.raises(ConnectionError):
            connection.sendall(b"0\r\n")
            for _ in range(64):
                connection.sendall(b"X-Sum: %b\r\n" % (b"a" * 1_000_000))


@pytest.mark.parametrize(
    "refused",
    [
        head(b"Transfer-Encoding: chunked") + b"0\r\n" + b"X-Sum: 1\r\n" * 4_000,
        head(b"Content-Length: 1000000000000"),
    ],
    ids=["too many trailers", "too large a body"],
)
def test_of_a_refused_client_little_is_read(serve, monkeypatch, refused):
    """It is let finish so that it sees the answer; but to read all that it cares to send would keep the
    frontend busy."""
    for module in (reply, http_server):
        monkeypatch.setattr(module, "LINGER_SECONDS", 600.0)
        monkeypatch.setattr(module, "LINGER_BYTES", 1_000_000)
    with connect(serve()) as connection:
        connection.sendall(refused)
        read_until(connection, b'"error"')
        connection.settimeout(1.0)
        with pytest.raises(TimeoutError):
            for _ in range(256):
                connection.sendall(b"a" * 1_000_000)


def test_trailers_are_dropped(serve):
    """They can not make up for what the head lacks."""
    body = body_of()
    data = b"%x\r\n%b\r\n0\r\nX-Request-Id: from-a-trailer\r\n\r\n" % (len(body), body)
    with connect(serve()) as connection:
        connection.sendall(head(b"Transfer-Encoding: chunked") + data + LAST_HEALTH)
        answers = read_all(connection)
    assert statuses(answers) == [200, 200]
    assert b"from-a-trailer" not in answers


# ---- what comes while an answer is under way ----


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("behind", "then"),
    [
        (b"\r\n", []),
        (b"\r\n\r\n\r\n" + HEALTH, [200]),
        (b"GET /hea", [408]),
        (b"\x16\x03 rubbish", [400]),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 40_000, [431]),
        (b"GET /health HTTP/1.1\r\n\r\n", [400]),
        (HEALTH + b"GET /hea", [200, 408]),
        (HEALTH + head(b"Transfer-Encoding: chunked") + b"zz", [200, 400]),
        (head(b"Transfer-Encoding: chunked") + TOO_MUCH["one trailer"], [431]),
    ],
    ids=[
        "empty line", "empty lines and a request", "half a head", "rubbish", "a large head", "no host",
        "a request and half a head", "a request and a broken one", "a request with large trailers",
    ],
)  # fmt: skip
def test_what_follows_a_request_does_not_cut_its_answer(serve, stream, behind, then):
    """The answer takes three times as long as a head may."""
    server = serve(Script(text="abcdefgh", delay=0.1), body_seconds=0.25, keep_alive_seconds=1)
    with connect(server) as connection:
        connection.sendall(chat(stream=stream))
        eventually(lambda: server.router.of_kind(Submit))
        connection.sendall(behind)
        answers = read_all(connection)
    assert statuses(answers) == [200, *then]
    first = answers.split(b"HTTP/1.1 ")[1]
    assert (b"[DONE]" if stream else b"abcdefgh") in first
    assert not server.router.of_kind(Cancel)


def test_empty_lines_do_not_keep_an_idle_connection_open(serve):
    server = serve(keep_alive_seconds=1)
    with connect(server) as connection:
        connection.settimeout(0.1)
        closed = False

        def is_closed() -> bool:
            nonlocal closed
            try:
                connection.sendall(b"\r\n")
                closed = connection.recv(100) == b""
            except TimeoutError:
                closed = False
            except ConnectionError:
                closed = True
            return closed

        eventually(is_closed)


# ---- clients that only stop sending ----


@pytest.mark.parametrize("requests", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_only_stops_sending_gets_its_answers(serve, stream, requests):
    server = serve(Script(text="abcdefgh", delay=0.05))
    with connect(server) as connection:
        connection.sendall(chat(stream=stream) * requests)
        connection.shutdown(socket.SHUT_WR)
        answers = read_all(connection)
    assert [status for status in statuses(answers) if status != 100] == [200] * requests
    assert answers.count(b"[DONE]" if stream else b'"content":"abcdefgh"') == requests
    assert not server.router.of_kind(Cancel)


@pytest.mark.parametrize("start", [b"", b"GET /hea", head(b"Content-Length: 9") + b"{"])
def test_half_a_request_gets_no_answer(serve, start):
    server = serve()
    with connect(server) as connection:
        connection.sendall(start)
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection) == b""
    assert not server.router.of_kind(Submit)


def test_an_old_client_that_stops_sending_has_left(serve):
    """HTTP/1.0 knows no interim answers, so nothing could tell whether it is still there."""
    server = serve(Script(hang_after=0))
    with connect(server) as connection:
        connection.sendall(chat().replace(b"HTTP/1.1", b"HTTP/1.0"))
        eventually(lambda: server.router.of_kind(Submit))
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection) == b""
    eventually(lambda: server.router.of_kind(Cancel))
