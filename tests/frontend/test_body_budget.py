"""All bodies of a frontend that still arrive share one budget."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import pytest

from frontend.errors import ApiError
from frontend.http.body_budget import UNCOUNTED_BYTES, BodyBudget
from tests.support.frontend import request_http
from tests.support.waiting import eventually

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}]}


@contextlib.contextmanager
def unfinished(server, size: int, length: int = 4_000_000):
    """A connection that has sent `size` bytes of a body."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {length}\r\n\r\n"
        ).encode()
        connection.sendall(head + b" " * size)
        yield connection


def test_the_largest_unfinished_body_makes_room(serve):
    server = serve(body_buffer_bytes=2_000_000, body_seconds=60.0)
    bodies = server.services.bodies
    with contextlib.ExitStack() as stack:
        small = stack.enter_context(unfinished(server, 500_000, 600_000))
        large = stack.enter_context(unfinished(server, 1_500_000))
        eventually(lambda: bodies.held == 2_000_000 - 2 * UNCOUNTED_BYTES)
        stack.enter_context(unfinished(server, 400_000))
        answer = large.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 3" in answer
        assert b'"too_many_bodies"' in answer
        # Neither those that were there before nor small ones are kept out.
        assert request_http(server, "POST", CHAT, BODY).status == 200
        rest = json.dumps(BODY).encode()
        small.sendall(rest + b" " * (100_000 - len(rest)))
        assert small.recv(65536).startswith(b"HTTP/1.1 200")
        eventually(lambda: bodies.held == 400_000 - UNCOUNTED_BYTES)
    eventually(lambda: bodies.held == 0)


def test_a_body_larger_than_all_is_refused_itself(serve):
    server = serve(body_buffer_bytes=1_000_000, body_seconds=60.0)
    with unfinished(server, 500_000), unfinished(server, 3_000_000) as large:
        assert large.recv(65536).startswith(b"HTTP/1.1 503")
        assert server.services.bodies.held == 500_000 - UNCOUNTED_BYTES


def test_bodies_that_have_arrived_are_not_given_up():
    async def run() -> None:
        budget = BodyBudget(1000, 1)
        with budget.share() as first, budget.share() as second:
            async with first.arriving(60):
                first.take(UNCOUNTED_BYTES + 1000)
            with pytest.raises(ApiError):
                async with second.arriving(60):
                    second.take(UNCOUNTED_BYTES + 1)
            assert budget.held == 1000
        assert budget.held == 0

    asyncio.run(run())


def test_one_given_up_as_it_ends_is_refused():
    async def run() -> None:
        budget = BodyBudget(1000, 1)
        with budget.share() as first, budget.share() as second:
            with pytest.raises(ApiError):
                async with first.arriving(60):
                    first.take(UNCOUNTED_BYTES + 1000)
                    async with second.arriving(60):
                        second.take(UNCOUNTED_BYTES + 999)
            assert budget.held == 999

    asyncio.run(run())
