"""More requests than fit, and readers that do not read: the others are served all the same."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
from collections import Counter

import psutil
import pytest

from daemon.cli.check.event_stream import whole_stream
from tests.support.raw_http import RawAnswer, post_request, read_answer
from tests.support.waiting import eventually

REQUESTS = 200
TOKENS = 20
READERS = 8
CHOICES = 4
READER_TOKENS = 1400
HIGH_WATER_KIB = 16
RUSHES = 20
LEVEL = 3
"""So many rushes in a row must find room in what the earlier ones took."""
SLACK = 512 << 10
"""Bytes. A leak of three kilobytes per request takes 1.8 MB in so many rushes; the noise of allocators
hides one of less than a kilobyte."""
CLIENT_SECONDS = 60.0


# ---- more requests than fit ------------------------------------------------------------------------


async def ask(address: tuple[str, int], streamed: bool) -> RawAnswer:
    body = {
        "prompt": "hello the", "max_tokens": TOKENS, "ignore_eos": True, "stream": streamed,
        "stream_options": {"include_usage": True} if streamed else None,
    }  # fmt: skip
    reader, writer = await asyncio.open_connection(*address)
    writer.write(post_request("/v1/completions", body))
    answer = read_answer(await reader.read())
    writer.close()
    return answer


async def rush(address: tuple[str, int]) -> list[RawAnswer]:
    asks = (ask(address, streamed=bool(i % 2)) for i in range(REQUESTS))
    return await asyncio.wait_for(asyncio.gather(*asks), CLIENT_SECONDS)


def check_rush(answers: list[RawAnswer]) -> Counter[int]:
    for answer in answers:
        if answer.status == 200:
            assert b'"completion_tokens":%d' % TOKENS in answer.body, answer.body[-300:]
            assert b'"error"' not in answer.body
        else:
            assert answer.status == 429, answer
            assert answer.headers["retry-after"] == "1"
            assert b'"overloaded"' in answer.body
    return Counter(answer.status for answer in answers)


def test_two_hundred_at_once_are_answered_or_told_to_come_again(serve):
    options = {"engine": "fake", "fake_step_ms": 5, "max_num_seqs": 4, "max_waiting": 8}
    with serve(**options, forked=False) as server:
        server.ready()
        pids = server.pids()
        memory: dict[str, list[int]] = {"frontend/0": [], "router": []}
        for _ in range(RUSHES):
            seen = check_rush(asyncio.run(rush(server.address)))
            assert seen[200] >= 8, seen  # as many as may wait are never turned away
            assert seen[429] > 0, "there was never an overload"
            eventually(lambda: not server.ask("requests"), 60, "none is left")
            for name, sizes in memory.items():
                sizes.append(resident(server, name))
            if all(is_level(sizes) for sizes in memory.values()):
                break
        else:
            pytest.fail(f"memory keeps growing: {memory}")
        assert server.metric("admission_rejections_total") > 0
        assert server.pids() == pids
        for queue in server.ask("queues"):
            if queue["capacity"]:
                assert queue["high_water"] <= queue["capacity"], queue
        assert "Traceback" not in server.log


def is_level(sizes: list[int]) -> bool:
    """Whether the last rushes fitted into memory that the earlier ones had taken. An allocator takes
    megabytes at first, and keeps them; what is leaked per request needs more each time."""
    earlier, last = sizes[:-LEVEL], sizes[-LEVEL:]
    return bool(earlier) and max(last) <= max(earlier) + SLACK


def resident(server, name: str) -> int:
    return psutil.Process(server.pids()[name]).memory_info().rss


# ---- readers that do not read ----------------------------------------------------------------------


class Reader:
    """A client with a small receive buffer that asks for megabytes and does not read them yet."""

    def __init__(self, address: tuple[str, int], tokens: int) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.settimeout(CLIENT_SECONDS)
        self._socket.connect(address)
        body = {
            "prompt": "hello the", "max_tokens": tokens, "ignore_eos": True, "logprobs": 20,
            "n": CHOICES, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        data = json.dumps(body).encode()
        self._socket.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data)
        )

    def read_all(self) -> tuple[int, int]:
        """Tokens by the answer's own count, and the bytes of its body."""
        response = http.client.HTTPResponse(self._socket)
        response.begin()
        assert response.status == 200
        body = response.read()
        return json.loads(whole_stream(body)[-1])["usage"]["completion_tokens"], len(body)

    def close(self) -> None:
        self._socket.close()


def small_answer(server) -> bool:
    reply = server.post(
        "/v1/completions", {"prompt": "hello", "max_tokens": 150, "ignore_eos": True}
    )
    return reply.status == 200 and reply.json["usage"]["completion_tokens"] == 150


def computed(server, ids: set[str]) -> dict[str, int]:
    """Tokens computed so far for each of the requests that still run."""
    rows = server.ask("requests")
    return {row["request_id"]: row["output_tokens"] for row in rows if row["request_id"] in ids}


def all_run(server, count: int) -> list[dict]:
    rows = server.ask("requests")
    return rows if len(rows) == count and all(row["output_tokens"] for row in rows) else []


@pytest.mark.slow
def test_slow_readers_are_paused_and_nobody_else_is(serve):
    with (
        serve(
            forked=False, engine="fake", fake_step_ms=1, max_num_seqs=READERS * CHOICES + 2,
            stream_high_water_kib=HIGH_WATER_KIB, slow_reader_seconds=120,
        ) as server,
        contextlib.ExitStack() as readers,
    ):  # fmt: skip
        server.ready()
        first = Reader(server.address, READER_TOKENS)
        tokens, size = first.read_all()
        first.close()
        assert tokens == CHOICES * READER_TOKENS
        assert small_answer(server)
        eventually(lambda: not server.ask("requests"), 60, "the first ones have ended")
        before = resident(server, "frontend/0")

        unread = [Reader(server.address, READER_TOKENS) for _ in range(READERS)]
        for reader in unread:
            readers.callback(reader.close)
        rows = eventually(lambda: all_run(server, READERS), 60, "all of them run")
        ids = {row["request_id"] for row in rows}

        def stand_still() -> bool:
            """A small answer has more steps than a heartbeat lasts."""
            earlier = computed(server, ids)
            return small_answer(server) and computed(server, ids) == earlier

        eventually(stand_still, 60, "all unread streams are paused")
        paused = computed(server, ids)
        assert len(paused) == READERS
        assert max(paused.values()) < CHOICES * READER_TOKENS, (
            "the streams were too short to need a pause"
        )
        for _ in range(20):
            assert small_answer(server)
        assert computed(server, ids) == paused
        growth = resident(server, "frontend/0") - before
        assert growth < READERS * size / 2, (growth, size)  # of what they asked for

        for reader in unread:
            assert reader.read_all()[0] == CHOICES * READER_TOKENS
        eventually(lambda: not server.ask("requests"), 60, "none is left")
