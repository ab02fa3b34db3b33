"""A thousand clients that go away, each in its own way and at its own moment, leave nothing."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
import struct
from dataclasses import dataclass

import psutil
import pytest

from daemon.cli.check.event_stream import DATA, DONE
from tests.support.raw_http import post_request
from tests.support.waiting import eventually

ROUNDS = 42
CONCURRENT = 24
ANSWER_SECONDS = 60.0
SETTLE_SECONDS = 60.0
"""Far more than it takes, but for a busy machine. What was given up tells that not all ended by itself."""

WAYS = ("close", "reset", "half close first")
MOMENTS = ("within the body", "before the answer", "during the answer", "after the answer")
SHORT, LONG = 4, 1500
SPARE_FDS = 8
"""So many more may be open for other reasons: of a thousand clients one in a hundred would tell."""


@dataclass(frozen=True)
class Client:
    """One client: how it leaves, when, and whether it asked for a stream."""

    way: str
    moment: str
    streamed: bool

    @property
    def request(self) -> bytes:
        body = {
            "prompt": "hello the", "temperature": 0, "ignore_eos": True,
            "max_tokens": SHORT if self.moment == "after the answer" else LONG,
            "stream": self.streamed,
        }  # fmt: skip
        return post_request("/v1/completions", body, close=False)


def leave(client: Client, writer: asyncio.StreamWriter) -> None:
    if client.way == "half close first":
        writer.write_eof()
    elif client.way == "reset":
        found = writer.get_extra_info("socket")
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    writer.close()


async def visit(address: tuple[str, int], client: Client) -> None:
    reader, writer = await asyncio.open_connection(*address)
    request = client.request
    if client.moment == "within the body":
        writer.write(request[:-20])
        await writer.drain()
        return leave(client, writer)
    writer.write(request)
    await writer.drain()
    if client.moment == "after the answer":
        await read_answer(client, reader)
    elif client.moment == "during the answer":
        if client.streamed:
            await read_events(reader, 3)
        else:  # A stream that began later tells that this one is being worked on.
            await visit(address, Client(client.way, client.moment, streamed=True))
    return leave(client, writer)


async def read_events(reader: asyncio.StreamReader, count: int) -> None:
    assert b" 200 " in await reader.readline()
    for _ in range(count):
        await reader.readuntil(DATA + b"{")


async def read_answer(client: Client, reader: asyncio.StreamReader) -> None:
    assert b" 200 " in await reader.readline()
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    if client.streamed:
        await reader.readuntil(DATA + DONE + b"\n\n")
        return
    length = int(head.partition("content-length:")[2].split()[0])
    usage = json.loads(await reader.readexactly(length))["usage"]
    assert usage["completion_tokens"] == SHORT


async def visit_all(address: tuple[str, int], clients: list[Client]) -> None:
    room = asyncio.Semaphore(CONCURRENT)

    async def one(client: Client) -> None:
        async with room:
            await asyncio.wait_for(visit(address, client), ANSWER_SECONDS)

    await asyncio.gather(*map(one, clients))


def left_over(server) -> dict[str, float]:
    """Everything that some process still holds of a request."""
    state = server.state()
    held = dict(state["status"]["requests"])
    held["rows of requests"] = len(state["requests"])
    for rank in state["cache"]:
        for name in ("pages_used", "slots_used", "sequences_running", "sequences_waiting"):
            held[f"{name} of {rank['process']}"] = rank[name]
    for queue in state["queues"]:
        held[f"{queue['queue']} of {queue['process']}"] = queue["depth"]
    return {name: value for name, value in held.items() if value}


@pytest.mark.slow
def test_a_thousand_clients_that_leave_leave_nothing(serve, within):
    clients = [Client(*how) for how in itertools.product(WAYS, MOMENTS, (True, False))] * ROUNDS
    random.Random(3).shuffle(clients)
    assert len(clients) >= 1000
    with serve() as server:
        server.ready()
        asyncio.run(visit_all(server.address, clients[:CONCURRENT]))
        eventually(
            lambda: not left_over(server), SETTLE_SECONDS, "the first ones have left nothing"
        )
        pids = server.pids()
        frontend = psutil.Process(pids["frontend/0"])
        eventually(
            lambda: server.metric("http_connections") <= 1, SETTLE_SECONDS, "they are disconnected"
        )
        descriptors = frontend.num_fds()

        asyncio.run(visit_all(server.address, clients))
        eventually(lambda: not left_over(server), within(1.0), "all tables are empty")

        for check, what in (
            (lambda: frontend.num_fds() <= descriptors + SPARE_FDS, "its connections are closed"),
            (lambda: not server.metric("stream_buffer_bytes"), "no bytes are kept"),
            (lambda: server.metric("http_requests_active") <= 1, "only this is asked"),
        ):
            eventually(check, SETTLE_SECONDS, what)
        given_up = server.metric("num_aborted_requests_total")
        assert given_up >= len(clients) / 4, "clients left, but no request was given up"
        assert server.pids() == pids
        assert all(row["restarts"] == 0 for row in server.ask("processes"))
        assert "Traceback" not in server.log
        body = {"prompt": "hello the", "max_tokens": SHORT, "ignore_eos": True}
        for _ in range(16):
            reply = server.post("/v1/completions", body)
            assert reply.json["usage"]["completion_tokens"] == SHORT
