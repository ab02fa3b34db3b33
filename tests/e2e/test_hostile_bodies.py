"""Bodies made to be slow to read, or never finished, cost neither a process nor another client's answer."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import threading

BODIES = {
    "keys": b'{"prompt":"a","metadata":{'
    + b",".join(b'"%d":[]' % i for i in range(900_000))
    + b"}}",
    "arrays": b'{"prompt":"a","metadata":{"a":[' + b"[]," * 900_000 + b"1]}}",
    "too many arrays": b"[" + b"[]," * 10_000_000 + b"1]",
    "ids": b'{"prompt":[' + b"1," * 15_000_000 + b"1]}",
    "number": b'{"prompt":"a","temperature":0.' + b"1" * 30_000_000 + b"}",
    "text": b'{"prompt":"' + b"a " * 15_000_000 + b'"}',
    "escapes": b'{"prompt":"' + b"\\u00e9" * 5_000_000 + b'"}',
}
ATTACKS = [(body, {}) for body in BODIES.values()] + [
    (gzip.compress(BODIES["too many arrays"], 1), {"Content-Encoding": "gzip"})
]
UNFINISHED = 20
HONEST = {"prompt": "hello", "max_tokens": 1}


def post(server, path: str, body: bytes, headers: dict[str, str]) -> int:
    connection = http.client.HTTPConnection(*server.address, timeout=120)
    with contextlib.closing(connection):
        connection.request("POST", path, body, {"Content-Type": "application/json", **headers})
        return connection.getresponse().status


def leave_unfinished(server, stack: contextlib.ExitStack) -> None:
    connection = stack.enter_context(
        contextlib.closing(http.client.HTTPConnection(*server.address, timeout=120))
    )
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", "20000000")
    connection.endheaders()
    # The largest may be refused before it has sent all.
    with contextlib.suppress(ConnectionError):
        connection.send(b" " * 5_000_000)


def test_hostile_bodies_hold_up_nobody(serve):
    statuses: list[int] = []
    with serve(engine="fake", body_buffer_mb=40) as server, contextlib.ExitStack() as stack:
        pids = server.ready().pids()

        def attack(body: bytes, headers: dict[str, str]) -> None:
            for path in ("/v1/completions", "/detokenize"):
                statuses.append(post(server, path, body, headers))

        for _ in range(UNFINISHED):
            leave_unfinished(server, stack)
        threads = [threading.Thread(target=attack, args=arguments) for arguments in ATTACKS]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert server.get("/health").status == 200
            headers = {"Content-Type": "application/json"}
            assert server.post("/v1/completions", HONEST, headers).status == 200
        for thread in threads:
            thread.join()
        assert len(statuses) == 2 * len(ATTACKS)
        assert set(statuses) <= {200, 400, 413, 503}
        assert server.pids() == pids
        assert "hangs" not in server.log
