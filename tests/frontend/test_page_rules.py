"""Pages of the web that reach this server through somebody's browser, and clients that are none."""

from __future__ import annotations

import json

import pytest

from frontend.errors import ApiError
from frontend.http.page_rules import PageRules
from tests.frontend.test_http_connections import connect, read_all, statuses
from tests.support.frontend import request_http
from transport.messages.from_daemon import ApiKeys, InstanceStatus
from transport.messages.to_router import Submit

CHAT = "/v1/chat/completions"
FLUSH = "/deepinfer/cache/flush"
BODY = {"messages": [{"role": "user", "content": "Hi"}]}
OURS = "https://chat.example"
ASK = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}


def use_keys(server) -> None:
    status = InstanceStatus("ready", keys=ApiKeys((b"secret",), ()))
    server.call(lambda: server.gate.take(status))


@pytest.mark.parametrize(
    ("headers", "status", "code", "says"),
    [
        ({"Origin": "https://evil.example"}, 403, "origin_not_allowed", "--cors-origin"),
        ({"Origin": "null"}, 403, "origin_not_allowed", "--cors-origin"),
        ({"Origin": "http://localhost:3000"}, 403, "origin_not_allowed", "--cors-origin"),
        ({"Host": "evil.example:8888"}, 421, "unknown_host", "--host"),
        ({"Host": "evil-localhost"}, 421, "unknown_host", "--host"),
        ({"Host": "localhost.evil.example"}, 421, "unknown_host", "--host"),
        ({"Host": "[::1", "Origin": "http://[::1"}, 421, "unknown_host", "--host"),
    ],
)
def test_foreign_pages_are_refused_everywhere(serve, headers, status, code, says):
    server = serve()
    for method, path, body in (
        ("POST", CHAT, BODY), ("POST", "/tokenize", BODY), ("POST", FLUSH, None), ("GET", "/v1/models", None),
        ("GET", "/deepinfer/state", None), ("GET", "/metrics", None), ("OPTIONS", CHAT, None),
    ):  # fmt: skip
        answer = request_http(server, method, path, body, headers)
        assert (answer.status, answer.json["error"]["code"]) == (status, code)
        assert says in answer.json["error"]["message"]
        assert "access-control-allow-origin" not in answer.headers
    assert not server.router.of_kind(Submit)
    assert request_http(server, "GET", "/health", headers=headers).status == 200
    assert request_http(server, "GET", "/ready", headers=headers).status == 200


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8888", "127.0.0.1:80", "[::1]:8888", "a.localhost", "192.168.1.5", ""],
)
def test_names_of_this_machine_are_ours(serve, host):
    server = serve()
    assert request_http(server, "POST", CHAT, BODY, {"Host": host}).status == 200
    headers = {"Host": host, "Origin": f"http://{host}"}  # a page that we are served beside
    assert request_http(server, "GET", "/v1/models", None, headers if host else {}).status == 200


@pytest.mark.parametrize(
    ("host", "address", "asked", "served"),
    [
        ("box.lan", "127.0.1.1", "box.lan:8888", True),
        ("box.lan", "127.0.1.1", "other.lan:8888", False),
        ("::1", "::1", "[::1]:8888", True),
        ("::1", "::1", "evil.example", False),
        ("0.0.0.0", "0.0.0.0", "any.example", True),
        ("::", "::", "any.example", True),
        ("box.lan", "10.0.0.7", "any.example", True),
    ],
)
def test_a_name_is_checked_where_only_this_machine_is_listened_to(host, address, asked, served):
    rules = PageRules((OURS,), host, address)
    rules.check({b"host": b"chat.example"})
    if served:
        rules.check({b"host": asked.encode()})
    else:
        with pytest.raises(ApiError):
            rules.check({b"host": asked.encode()})
    with pytest.raises(ApiError):
        rules.check({b"host": asked.encode(), b"origin": b"https://evil.example"})


@pytest.mark.parametrize("content_type", [b"", b"Content-Type: text/plain\r\n"])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize", "/detokenize", FLUSH])
def test_a_body_must_say_that_it_is_json(serve, path, content_type):
    server = serve()
    body = json.dumps(BODY).encode()
    top = b"POST %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" % path.encode()
    with connect(server) as connection:
        connection.sendall(top + content_type + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        answer = read_all(connection)
    assert statuses(answer) == [415]
    assert b"must be application/json" in answer


def test_a_flush_without_a_body_needs_no_type(serve):
    server = serve()
    with connect(server) as connection:
        connection.sendall(
            b"POST %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % FLUSH.encode()
        )
        assert statuses(read_all(connection)) == [200]


def test_pages_of_an_allowed_origin_are_let_in(serve):
    server = serve(cors_origin=("http://localhost:3000", "HTTPS://Chat.Example"))
    origin = {"Origin": OURS}
    for path, body, status in (
        (CHAT, BODY, 200), (CHAT, {**BODY, "stream": True}, 200), (CHAT, b"{", 400), ("/nothing", b"", 404),
    ):  # fmt: skip
        answer = request_http(server, "POST", path, body, origin)
        assert answer.status == status
        assert answer.headers["access-control-allow-origin"] == OURS
        assert answer.headers["vary"] == "Origin"
    answer = request_http(server, "GET", "/v1/models", None, {**origin, "Host": "chat.example"})
    assert answer.status == 200  # a proxy hands on what the browser asked for
    stranger = request_http(server, "POST", CHAT, BODY, {"Origin": "https://evil.example"})
    assert (stranger.status, stranger.headers["vary"]) == (403, "Origin")
    assert "access-control-allow-origin" not in stranger.headers


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/nothing"])
def test_a_preflight_needs_no_key(serve, path):
    server = serve(cors_origin=(OURS,))
    use_keys(server)
    answer = request_http(server, "OPTIONS", path, None, {"Origin": OURS, **ASK})
    assert (answer.status, answer.body) == (200, b"")
    assert answer.headers["access-control-allow-origin"] == OURS
    assert answer.headers["access-control-allow-headers"] == ASK["Access-Control-Request-Headers"]
    assert "POST" in answer.headers["access-control-allow-methods"]
    stranger = request_http(
        server, "OPTIONS", path, None, {"Origin": "https://evil.example", **ASK}
    )
    assert stranger.status == 401
    refused = request_http(server, "POST", path, BODY, {"Origin": OURS})
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, OURS)


def test_whoever_has_a_key_is_no_strange_page(serve):
    server = serve()
    use_keys(server)
    headers = {"Host": "any.example", "Origin": "https://any.example:1", "X-Api-Key": "secret"}
    answer = request_http(server, "POST", CHAT, BODY, headers)
    assert answer.status == 200
    assert "access-control-allow-origin" not in answer.headers
