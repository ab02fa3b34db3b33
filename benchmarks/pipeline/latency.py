"""Time from a request's bytes out of the client to the first content byte in.

Under load a request has to wait for the engine, which is no cost of the pipeline. What is taken off
for that is the engine's own steps and nothing else: of the time that a request was at its rank
(`queue` in the server's access log: from the router's choice to the router's sight of the first
token), the share in which the engine's steps of STEP_SECONDS ran. The rest of that time, two ZeroMQ
hops and the worker's own work, stays in the figure.
"""

from __future__ import annotations

import random
import socket
import statistics
import time
from dataclasses import dataclass

from benchmarks.clients.streams import OpenStream, StreamPool
from benchmarks.servers import Served

STREAMS = 256
STEP_SECONDS = 0.020
WARM_UP = 20
LONG_TOKENS = 7000
"""No steady stream ends within a measurement; it fits into the fake model's 8192."""


@dataclass
class Latency:
    """Milliseconds."""

    count: int
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: list[float]) -> Latency:
        cuts = statistics.quantiles(seconds, n=100, method="inclusive")
        return cls(len(seconds), cuts[49] * 1e3, cuts[89] * 1e3, cuts[98] * 1e3)


@dataclass
class LoadedLatency:
    """Time to first token beside other streams."""

    raw: Latency
    """As the client sees it."""
    outside: Latency
    """Less all time at the rank: a lower bound of what the pipeline adds."""
    added: Latency | None = None
    """Less the engine's own steps; None where their share is not known."""
    engine_share: float = 0.0
    """Part of the wall time in which the engine's steps ran."""
    cpu_per_token: float = 0.0
    """Seconds of the frontend's CPU time per token; at this pace every token is a write."""
    reads_per_token: float = 0.0
    """Reads of the client; close to 1: tokens hardly ever came two in a piece."""


def body(max_tokens: int) -> dict[str, object]:
    """A short chat prompt (31 tokens)."""
    return {
        "model": "SmolLM2-135M-Instruct",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }


def waited(stream: OpenStream) -> float:
    return stream.first_content_at - stream.sent_at


def measure_one(server: Served, requests: int) -> Latency:
    """One request after the other on one kept connection; nothing is taken off."""
    pool = StreamPool("127.0.0.1", server.port)
    connection: socket.socket | None = None
    waits: list[float] = []
    for number in range(requests + WARM_UP):
        ended: list[OpenStream] = []
        stream = pool.open(body(1), f"one{number}", connection)
        while not ended:
            pool.read(5.0, ended.append)
        connection = stream.connection
        if number >= WARM_UP:
            waits.append(waited(stream))
    pool.close()
    return Latency.of(waits)


def measure_probes(server: Served, seconds: float) -> LoadedLatency:
    """Single requests on a connection of their own, beside STREAMS streams that never end.

    The instance must have room for one sequence more than STREAMS."""
    pool = StreamPool("127.0.0.1", server.port)
    probes: list[OpenStream] = []
    steady = [pool.open(body(LONG_TOKENS), f"steady{i}") for i in range(STREAMS)]
    while not all(stream.first_content_at for stream in steady):
        pool.read(1.0, probes.append)
    gaps = random.Random(1)

    def probe_until(end: float, connection: socket.socket | None) -> socket.socket | None:
        while time.perf_counter() < end:
            # A random moment of a step: probes in step with the engine would see one moment only.
            _read_until(pool, time.perf_counter() + gaps.uniform(0.0, 2 * STEP_SECONDS), probes)
            known = len(probes)
            stream = pool.open(body(1), f"probe{known}", connection)
            while len(probes) == known:
                pool.read(5.0, probes.append)
            connection = stream.connection
        return connection

    kept = probe_until(time.perf_counter() + 1.0, None)
    warm = len(probes)
    began, cpu = time.perf_counter(), server.cpu_seconds()
    events, reads = pool.events, pool.reads
    before = [stream.events for stream in steady]
    probe_until(began + seconds, kept)
    wall = time.perf_counter() - began
    used = server.cpu_seconds()["frontend/0"] - cpu["frontend/0"]
    measured = probes[warm:]
    tokens = pool.events - events
    reads = pool.reads - reads
    pool.close()
    # A stream gets one token a decode step. A token that shows nothing has no event: the stream with
    # the most events tells. Every probe takes a prompt step of its own.
    decode_steps = max(s.events - had for s, had in zip(steady, before, strict=True))
    share = (decode_steps + len(measured)) * STEP_SECONDS / wall
    at_rank = server.times_at_rank()
    measured = [stream for stream in measured if stream.request_id in at_rank]
    return LoadedLatency(
        raw=Latency.of([waited(s) for s in measured]),
        outside=Latency.of([waited(s) - at_rank[s.request_id] for s in measured]),
        added=Latency.of([waited(s) - share * at_rank[s.request_id] for s in measured]),
        engine_share=share,
        cpu_per_token=used / tokens,
        reads_per_token=reads / tokens,
    )


def _read_until(pool: StreamPool, end: float, done: list[OpenStream]) -> None:
    while (left := end - time.perf_counter()) > 0:
        pool.read(left, done.append)


def measure_clients(server: Served, seconds: float) -> LoadedLatency:
    """STREAMS clients, each sending its next request (64 tokens) when the last one is done.

    Harder than probes: a hundred prompts a second, and whole bursts of them."""
    pool = StreamPool("127.0.0.1", server.port)
    finished: list[OpenStream] = []
    numbers = iter(range(10**9))

    def next_one(stream: OpenStream) -> None:
        finished.append(stream)
        pool.open(body(64), f"load{next(numbers)}", stream.connection)

    # Spread over one request's time, so that requests do not arrive in step.
    for number in range(STREAMS):
        pool.open(body(16 + number % 64), f"load{next(numbers)}")
        pool.read(0.002, next_one)
    settle = time.perf_counter() + 3.0
    while time.perf_counter() < settle:
        pool.read(0.1, next_one)
    finished.clear()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pool.read(0.1, next_one)
    pool.close()
    at_rank = server.times_at_rank()
    known = [stream for stream in finished if stream.request_id in at_rank]
    return LoadedLatency(
        raw=Latency.of([waited(s) for s in known]),
        outside=Latency.of([waited(s) - at_rank[s.request_id] for s in known]),
    )
