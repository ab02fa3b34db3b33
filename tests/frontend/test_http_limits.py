"""Limits, keys, ids and states: what is answered before any prompt is looked at."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import http.client
import json
import logging
import os
import re
import socket
import time
import tracemalloc
import zlib

import pytest

from daemon.cli.check.event_stream import whole_stream
from frontend.errors import ApiError
from frontend.http.body_budget import BodyBudget
from frontend.http.body_limits import BodyLimits, read_body
from frontend.readiness import Readiness
from tests.support.frontend import Script, request_http
from tests.support.waiting import eventually
from transport.messages.from_daemon import ApiKeys, Drain, InstanceStatus
from transport.messages.to_router import Submit

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}]}
RAW = json.dumps(BODY).encode()


def talk(server, data: bytes, seconds: float = 10.0) -> bytes:
    """Send bytes, read until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=seconds) as connection:
        connection.sendall(data)
        received = b""
        while piece := connection.recv(65536):
            received += piece
        return received


def head(*lines: bytes, path: bytes = CHAT.encode()) -> bytes:
    top = [b"POST %s HTTP/1.1" % path, b"Host: localhost", b"Content-Type: application/json"]
    return b"\r\n".join([*top, *lines]) + b"\r\n\r\n"


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_unknown_paths_and_methods(serve, method):
    server = serve()
    answer = request_http(server, method, "/nowhere", RAW)
    assert (answer.status, answer.json["error"]["type"]) == (404, "not_found_error")
    answer = request_http(server, "GET", CHAT)
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    assert answer.json["error"]["message"] == "GET is not possible at this path: use POST."
    answer = request_http(server, "DELETE", "/health")
    assert answer.json["error"]["message"].endswith("use GET or HEAD.")
    assert request_http(server, "POST", CHAT + "/", BODY).status == 200


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ('Application/JSON ; charset="UTF-8"', 200),
        ("application/json; charset=latin-1", 415),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        (";;;", 415),
    ],
)
def test_content_types(serve, content_type, status):
    answer = request_http(serve(), "POST", CHAT, RAW, {"Content-Type": content_type})
    assert answer.status == status


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize(
    ("encoding", "data", "status"),
    [
        ("gzip", gzip.compress(RAW, mtime=0), 200),
        ("X-GZIP", gzip.compress(RAW, mtime=0), 200),
        ("deflate", zlib.compress(RAW), 200),
        ("deflate", raw_deflate(RAW), 200),
        ("identity", RAW, 200),
        ("gzip", RAW, 400),
        ("gzip", gzip.compress(RAW, mtime=0)[:-9], 400),
        ("gzip", gzip.compress(RAW, mtime=0) + b"x", 400),
        ("gzip", b"", 400),
        ("gzip, gzip", gzip.compress(RAW, mtime=0), 415),
        ("br", RAW, 415),
        ("gzip", gzip.compress(b" " * (9 << 20), mtime=0), 413),
        ("gzip", gzip.compress(RAW + b" " * (1 << 19), mtime=0), 200),
        ("gzip", gzip.compress(RAW + b" " * (2 << 20), mtime=0), 413),  # little that becomes much
    ],
)
def test_content_encodings(serve, encoding, data, status):
    answer = request_http(serve(), "POST", CHAT, data, {"Content-Encoding": encoding})
    assert answer.status == status
    if status != 200:
        assert answer.json["error"]["message"]


@pytest.mark.parametrize(("encoding", "copies"), [("identity", 1), ("gzip", 2)])
def test_a_large_body_is_in_memory_once_as_it_came_and_once_inflated(encoding, copies):
    """To copy 30 MB holds up the event loop for tens of milliseconds, and that at every turn where what
    is left of compressed data was copied."""
    data = os.urandom(4 << 20)
    sent = gzip.compress(data) if encoding == "gzip" else data
    parts = [sent[at : at + 65_536] for at in range(0, len(sent), 65_536)]

    async def receive():
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def read() -> tuple[bytearray, int]:
        headers = {b"content-type": b"application/json", b"content-encoding": encoding.encode()}
        tracemalloc.start()
        try:
            with BodyBudget(1 << 30, retry_after=1).share() as share:
                body = await read_body(headers, receive, BodyLimits(1 << 30, 60.0), share)
            return body, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    body, most_bytes = asyncio.run(read())
    assert body == data
    assert most_bytes < (copies + 0.7) * len(data)


def test_announced_bodies_are_refused_before_they_are_sent(serve):
    server = serve()
    lines = (b"Expect: 100-continue", b"Content-Length: 10000000000")
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(head(*lines))
        assert connection.recv(4096).startswith(b"HTTP/1.1 413")
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(head(b"Expect: 100-continue", b"Content-Length: %d" % len(RAW)))
        assert connection.recv(4096).startswith(b"HTTP/1.1 100 Continue")
        connection.sendall(RAW)
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")


def test_a_body_that_grows_too_large_is_refused(serve):
    server = serve(max_body_bytes=100_000)
    data = b"".join(b"%x\r\n%s\r\n" % (50_000, b" " * 50_000) for _ in range(3)) + b"0\r\n\r\n"
    answer = talk(server, head(b"Transfer-Encoding: chunked") + data)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"larger than 100000 bytes" in answer
    assert request_http(server, "POST", CHAT, b" " * 100_001).status == 413


def test_a_body_is_bounded_as_a_whole_however_its_pieces_come():
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b" " * 60, "more_body": True}

    async def run() -> None:
        with BodyBudget(1 << 20, 1).share() as share:
            headers = {b"content-type": b"application/json"}
            await read_body(headers, receive, BodyLimits(100, 60.0), share)

    with pytest.raises(ApiError, match="larger than 100 bytes") as caught:
        asyncio.run(run())
    assert caught.value.status == 413


def test_slow_bodies_and_heads_time_out(serve):
    server = serve(body_seconds=0.3)
    assert talk(server, head(b"Content-Length: 50") + b"{").startswith(b"HTTP/1.1 408")
    assert talk(server, b"POST / HTTP/1.1\r\nHost:").startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("size", [70_000, 600_000])
def test_large_heads_are_refused(serve, size):
    answer = talk(serve(), head(b"X-Big: " + b"a" * size, b"Content-Length: 0"))
    assert answer.startswith(b"HTTP/1.1 431")
    assert b'"error"' in answer


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize(
    "request_head",
    [
        head(path=b"/" + b"a" * 34_000),  # the limit is 32,768
        head(*[b"x-%04d: 1" % number for number in range(3500)]),
        head(*[b"a: " for number in range(7000)]),
    ],
    ids=["path", "many headers", "empty headers"],
)
def test_a_head_is_too_large_in_whatever_part_and_pieces(serve, request_head, pieces):
    server = serve()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        size = -(-len(request_head) // pieces)
        for start in range(0, len(request_head), size):
            connection.sendall(request_head[start : start + size])
            time.sleep(0.02)
        assert connection.recv(4096).startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (b"GET /health HTTP/1.1", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y", 400),
        (b"GET /health HTTP/1.1\r\nHost:", 200),
        (b"GET /health HTTP/1.0", 200),
    ],
)
def test_a_request_has_one_host(serve, lines, status):
    answer = talk(serve(), lines + b"\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.%d %d" % (1, status))
    assert (b"one Host header" in answer) == (status == 400)


@pytest.mark.parametrize(
    ("data", "status", "request_id"),
    [
        (b"\x16\x03\x01\x00\xa5", 400, None),
        (head(b"X-Request-Id: r-1", b"X-Big: " + b"a" * 40_000), 431, "r-1"),
        (b"POST / HTTP/1.1\r\nX-Request-Id: r-2\r\nHost:", 408, "r-2"),
        (b"GET /health HTTP/1.1\r\nX-Request-Id: r-3\r\n\r\n", 400, "r-3"),
        # The id of a request does not pass to the rubbish behind it.
        (b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: r-4\r\n\r\n\x16\x03", 400, None),
    ],
    ids=["rubbish", "large", "slow", "no host", "rubbish behind a request"],
)
def test_refused_heads_are_counted_logged_and_have_an_id(serve, caplog, data, status, request_id):
    caplog.set_level(logging.INFO, logger="frontend.access")
    server = serve(body_seconds=0.3)
    answer = talk(server, data)
    refusal = answer[answer.index(b"HTTP/1.1 %d " % status) :]
    found = re.search(rb"x-request-id: (\S+)\r\n", refusal)[1].decode()
    assert found == request_id or (request_id is None and re.fullmatch("[0-9a-f]{32}", found))
    lines = [r.getMessage() for r in caplog.records if r.name == "frontend.access"]
    assert any(line.startswith(f"- other {status} id={found} total=") for line in lines)
    counts = dict(server.metrics.read_counters()["http_requests"])
    assert counts["other", str(status)] == 1


def test_a_path_with_a_parameter_has_a_plain_label(serve):
    server = serve()
    assert request_http(server, "GET", "/v1/models/test-model").status == 200
    eventually(lambda: server.metrics.read_counters().get("http_requests"))
    counts = dict(server.metrics.read_counters()["http_requests"])
    assert counts == {("/v1/models/{model}", "200"): 1}


def test_what_is_no_http_gets_an_error_object(serve):
    answer = talk(serve(), b"\x16\x03\x01\x00\xa5\x01\x00\x00" * 10)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b'"invalid_request_error"' in answer


def test_old_clients_get_no_chunks(serve):
    server = serve()
    body = json.dumps({**BODY, "stream": True}).encode()
    request = head(b"Content-Length: %d" % len(body)).replace(b"HTTP/1.1", b"HTTP/1.0") + body
    answer = talk(server, request)
    top, _, events = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in top.lower()
    assert events.endswith(b"data: [DONE]\n\n")
    assert events.startswith(b"data: ")


def use_keys(server, **keys: tuple[bytes, ...]) -> None:
    server.call(lambda: server.gate.take(InstanceStatus("ready", keys=ApiKeys(**keys))))


def test_api_keys(serve):
    server = serve()
    use_keys(server, users=(b"secret-one", b"secret-two"))
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": "secret"}):
        answer = request_http(server, "POST", CHAT, BODY, headers)
        assert (answer.status, answer.json["error"]["code"]) == (401, "invalid_api_key")
    for headers in ({"Authorization": "bearer secret-two"}, {"x-api-key": "secret-one"}):
        assert request_http(server, "POST", CHAT, BODY, headers).status == 200
    assert request_http(server, "GET", "/v1/models").status == 401
    assert request_http(server, "GET", "/health").status == 200
    assert request_http(server, "GET", "/ready").status == 200
    assert len(server.router.of_kind(Submit)) == 2


ADMINISTRATION = (
    ("GET", "/metrics"), ("GET", "/deepinfer/metrics"), ("GET", "/deepinfer/state"),
    ("GET", "/deepinfer/state/"), ("POST", "/deepinfer/cache/flush"),
)  # fmt: skip


@pytest.mark.parametrize(("method", "path"), ADMINISTRATION)
def test_administration_wants_a_key_of_its_own_where_there_are_such_keys(serve, method, path):
    server = serve()

    def status(key: str | None) -> int:
        return request_http(server, method, path, headers={"x-api-key": key} if key else {}).status

    assert status(None) == 200
    use_keys(server, users=(b"user",))
    assert (status(None), status("user")) == (401, 200)
    use_keys(server, users=(b"user",), admins=(b"admin",))
    assert (status(None), status("wrong"), status("user"), status("admin")) == (401, 401, 403, 200)
    use_keys(server, admins=(b"admin",))
    assert (status(None), status("user"), status("admin")) == (401, 401, 200)


def test_a_key_for_administration_opens_everything_and_a_user_is_told_what_lacks(serve):
    server = serve()
    use_keys(server, users=(b"user",), admins=(b"admin",))
    for key in ("user", "admin"):
        assert request_http(server, "POST", CHAT, BODY, {"x-api-key": key}).status == 200
    refused = request_http(server, "GET", "/metrics", headers={"x-api-key": "user"})
    error = refused.json["error"]
    assert (error["type"], error["code"]) == ("permission_error", "admin_key_required")
    use_keys(server, admins=(b"admin",))
    assert request_http(server, "POST", CHAT, BODY).status == 200


def test_before_the_daemon_has_told_the_keys_nothing_opens(serve):
    server = serve()
    server.call(lambda: setattr(server.gate, "readiness", Readiness()))
    assert request_http(server, "GET", "/deepinfer/state").status == 503
    assert request_http(server, "GET", "/health").status == 200


def test_request_ids_come_back(serve):
    server = serve()
    answer = request_http(server, "GET", "/health", headers={"X-Request-Id": "abc-1.2"})
    assert answer.headers["x-request-id"] == "abc-1.2"
    for bad in ("x" * 200, "a b", "", "a\tb"):
        answer = request_http(server, "GET", "/health", headers={"X-Request-Id": bad})
        assert len(answer.headers["x-request-id"]) == 32


def test_a_degraded_instance_says_so_but_serves_on(serve):
    server = serve()
    server.call(
        lambda: server.gate.take(InstanceStatus("degraded", "worker/1: ended with signal SIGKILL"))
    )
    ready = request_http(server, "GET", "/ready")
    assert (ready.status, ready.json["state"]) == (503, "degraded")
    assert "worker/1" in ready.json["reason"]
    assert request_http(server, "POST", CHAT, BODY).status == 200


def test_not_ready_and_draining(serve):
    server = serve()
    server.call(lambda: server.gate.take(InstanceStatus("starting", "rank 1 loads its weights")))
    answer = request_http(server, "POST", CHAT, BODY)
    assert (answer.status, answer.headers["retry-after"]) == (503, "3")
    assert "rank 1 loads its weights" in answer.json["error"]["message"]
    ready = request_http(server, "GET", "/ready")
    assert (ready.status, ready.json["reason"]) == (503, "rank 1 loads its weights")
    assert request_http(server, "GET", "/health").status == 200
    server.call(lambda: server.gate.take(InstanceStatus("ready", "")))
    assert request_http(server, "GET", "/ready").status == 200
    server.call(lambda: server.gate.take(Drain()))
    assert request_http(server, "GET", "/ready").json["state"] == "draining"
    assert request_http(server, "POST", CHAT, BODY).status == 503
    assert server.metrics.read_counters()["admission_rejections"] == [
        (("not_ready",), 1.0),
        (("draining",), 1.0),
    ]


@pytest.mark.parametrize("stream", [True, False])
def test_running_requests_can_be_ended(serve, stream):
    server = serve(Script(hang_after=2))
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    with contextlib.closing(connection):
        connection.request(
            "POST", CHAT, json.dumps({**BODY, "stream": stream}),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        eventually(lambda: len(server.services.jobs) == 1)
        if stream:
            answer = connection.getresponse()  # it has begun, with status 200
        server.call(lambda: server.services.end_all(ApiError(503, "Shutting down.")))
        if stream:
            assert answer.status == 200
            *_, last = whole_stream(answer.read())
            assert json.loads(last)["error"]["message"] == "Shutting down."
        else:
            assert connection.getresponse().status == 503
    eventually(lambda: not server.services.jobs)


def test_tokenize_and_detokenize(serve):
    server = serve()
    answer = request_http(server, "POST", "/tokenize", {"prompt": "Aé"}).json
    assert answer == {"tokens": [65, 0xC3, 0xA9], "count": 3, "max_model_len": 4096}
    answer = request_http(server, "POST", "/detokenize", {"tokens": answer["tokens"]}).json
    assert answer["prompt"] == answer["content"] == "Aé"
    assert request_http(server, "POST", "/detokenize", {"tokens": [300]}).status == 400


def test_daemon_answers(serve):
    server = serve()
    assert request_http(server, "GET", "/metrics").body == b"answer to metrics"
    assert request_http(server, "GET", "/deepinfer/metrics").body == b"answer to metrics"
    assert request_http(server, "GET", "/deepinfer/state").body == b"answer to state"


def test_a_flush_tells_what_each_cache_held_or_which_worker_is_silent(serve):
    server = serve()
    held = {"enabled": True, "pages_used": 7, "states_used": 2}
    server.cache_reports = [
        {"process": "worker/0", "pid": 1, "cache": held},
        {"process": "worker/1", "pid": 2, "cache": {"enabled": False}},
    ]
    answer = request_http(server, "POST", "/deepinfer/cache/flush")
    assert answer.json == {"flushed": [{"worker": "worker/0", "pages": 7, "states": 2}]}
    server.cache_reports[1] = {"process": "worker/1", "pid": 2, "problem": "it is stopped"}
    answer = request_http(server, "POST", "/deepinfer/cache/flush")
    assert answer.status == 503
    message = answer.json["error"]["message"]
    assert "worker/1: it is stopped" in message
    assert "emptied: worker/0" in message
    assert answer.json["error"]["code"] == "not_all_flushed"
    assert answer.headers["retry-after"] == "3"


def test_the_access_log_has_no_line_for_a_probe_that_goes_well(serve, caplog):
    caplog.set_level(logging.INFO, logger="frontend.access")
    server = serve()
    for path in ("/health", "/ready", "/metrics", "/nowhere"):
        request_http(server, "GET", path)
    caplog.set_level(logging.DEBUG, logger="frontend.access")
    request_http(server, "GET", "/health")

    def lines() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.name == "frontend.access"]

    eventually(lambda: len(lines()) >= 2)
    answers = [line.partition(" id=")[0] for line in lines()]
    assert answers == ["- other 404", "GET /health 200"]


def test_the_access_log_has_counts_and_no_text(serve, caplog):
    caplog.set_level(logging.INFO, logger="frontend.access")
    server = serve()
    request_http(server, "POST", CHAT, BODY, {"x-request-id": "r-1"})
    request_http(server, "GET", "/secret-path")

    def lines() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.name == "frontend.access"]

    eventually(lambda: len(lines()) >= 2)
    line, unknown = lines()[:2]
    assert line.startswith(f"POST {CHAT} 200 id=r-1 prompt=")
    for word in ("completion=26", "cached=0", "finish=stop", "first_token=", "total="):
        assert word in line
    assert "Grü" not in line
    assert "secret" not in unknown
