"""How fast the pipeline is without a model: `python -m benchmarks.pipeline [--json FILE]`.

Three measurements against real instances with the fake engine (its tokens cost next to nothing):

1. Streaming: 256 streams as fast as they go. The frontend's own CPU seconds count, so that the other
   processes, which share the machine's cores, do not hide what one frontend can do.
2. Added latency of one request at a time, HTTP in to first content out, all hops included.
3. The same beside 256 streams at a decode pace of 20 ms a step. Waiting for the engine (which a step
   time makes unavoidable) is taken off: the server's own `queue` time of that very request.
"""

from __future__ import annotations

import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import cyclopts
import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.servers import Served, instance, naive_server
from benchmarks.sse_client import OpenStream, StreamPool

STREAMS = 256
STEP_MS = 20.0
GOAL_TOKENS_PER_CORE = 150_000
GOAL_ONE_MS = 1.0
GOAL_LOADED_MS = 5.0


@dataclass
class Throughput:
    """Streaming at full speed."""

    tokens: int
    wall_seconds: float
    cpu_seconds: dict[str, float]

    @property
    def per_core(self) -> float:
        """Tokens per second of the frontend's CPU time."""
        return self.tokens / self.cpu_seconds["frontend/0"]


@dataclass
class Latency:
    """Milliseconds."""

    count: int
    p50: float
    p90: float
    p99: float


def body(max_tokens: int) -> dict[str, object]:
    """A short chat prompt (31 tokens)."""
    return {
        "model": "SmolLM2-135M-Instruct",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }


def latency_of(seconds: list[float]) -> Latency:
    """Percentiles."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return Latency(len(seconds), cuts[49] * 1e3, cuts[89] * 1e3, cuts[98] * 1e3)


def measure_throughput(server: Served, seconds: float) -> Throughput:
    """Keep STREAMS streams of 2000 tokens open, a new one for each that ends; count for `seconds`."""
    pool = StreamPool("127.0.0.1", server.port)
    numbers = iter(range(10**9))

    def next_one(stream: OpenStream) -> None:
        pool.open(body(2000), f"t{next(numbers)}", stream.connection)

    def read_until(end: float) -> None:
        while time.perf_counter() < end:
            pool.read(0.1, next_one)

    for _ in range(STREAMS):
        pool.open(body(2000), f"t{next(numbers)}")
        pool.read(0.0, next_one)
    read_until(time.perf_counter() + 2.0)
    events, began, cpu = pool.events, time.perf_counter(), server.cpu_seconds()
    read_until(began + seconds)
    wall = time.perf_counter() - began
    used = {name: after - cpu[name] for name, after in server.cpu_seconds().items()}
    counted = pool.events - events
    pool.close()
    return Throughput(counted, wall, used)


def measure_one(server: Served, requests: int) -> Latency:
    """One request after the other on one kept connection."""
    pool = StreamPool("127.0.0.1", server.port)
    connection: socket.socket | None = None
    waits: list[float] = []
    for number in range(requests + 20):
        ended: list[OpenStream] = []
        stream = pool.open(body(1), f"one{number}", connection)
        while not ended:
            pool.read(5.0, ended.append)
        connection = stream.connection
        if number >= 20:
            waits.append(stream.first_content_at - stream.sent_at)
    pool.close()
    return latency_of(waits)


def measure_loaded(server: Served, seconds: float) -> tuple[Latency, Latency]:
    """STREAMS connections, each sending its next request (64 tokens) when the last one is done.

    Returns the raw time to the first token, and the same less the wait for the engine."""
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
    engine = server.engine_waits()
    raw = [s.first_content_at - s.sent_at for s in finished]
    added = [
        s.first_content_at - s.sent_at - engine[s.request_id]
        for s in finished
        if s.request_id in engine
    ]
    return latency_of(raw), latency_of(added)


def show(
    ours: Throughput,
    naive: Throughput,
    one: Latency,
    raw: Latency,
    added: Latency,
    console: Console,
) -> None:
    """Print the tables."""
    table = Table("", "measured", "goal", "", title=f"Pipeline without a model, {STREAMS} streams")

    def row(name: str, value: float, goal: float, text: Callable[[float], str], up: bool) -> None:
        met = value >= goal if up else value <= goal
        sign = "≥" if up else "≤"
        mark = "[green]met[/]" if met else "[red]missed[/]"
        table.add_row(name, text(value), f"{sign} {text(goal)}", mark)

    row("tokens/s per frontend core", ours.per_core, GOAL_TOKENS_PER_CORE, "{:,.0f}".format, True)
    row("added latency p50, 1 stream", one.p50, GOAL_ONE_MS, "{:.2f} ms".format, False)
    row("added latency p50, 256 streams", added.p50, GOAL_LOADED_MS, "{:.2f} ms".format, False)
    console.print(table)
    details = Table("", "p50", "p90", "p99", "requests", title="Time to first token, ms")
    for name, latency in (
        ("1 stream", one), (f"256 streams, raw (step {STEP_MS:g} ms)", raw),
        ("256 streams, without the wait for the engine", added),
    ):  # fmt: skip
        details.add_row(
            name, *(f"{v:.2f}" for v in (latency.p50, latency.p90, latency.p99)), str(latency.count)
        )
    console.print(details)
    costs = Table("process", "CPU µs per token", title="Streaming at full speed")
    for name, seconds in ours.cpu_seconds.items():
        costs.add_row(name, f"{seconds / ours.tokens * 1e6:.2f}")
    console.print(costs)
    console.print(
        f"wall: {ours.tokens / ours.wall_seconds:,.0f} tokens/s with all processes and the client on "
        f"this machine's cores\nbaseline (one Starlette chunk a token, no engine): "
        f"{naive.per_core:,.0f} tokens/s per core; ours / baseline = "
        f"{ours.per_core / naive.per_core:.1f}"
    )


def main(
    *,
    requests: int = 300,
    seconds: float = 8.0,
    frontends: int = 1,
    model: Path | None = None,
    json: Path | None = None,
) -> None:
    """Run all measurements.

    Parameters
    ----------
    requests
        Requests of the single-stream latency.
    seconds
        Duration of the streaming measurements and of the loaded latency, each.
    frontends
        Frontend processes in the loaded latency measurement.
    model
        Directory whose tokenizer is used; default: the default model's.
    json
        Write the figures to this file.
    """
    console = Console(highlight=False)
    options: dict[str, object] = {"max_num_seqs": STREAMS, "max_waiting": STREAMS}
    if model is not None:
        options |= {"model": model, "served_model_name": "SmolLM2-135M-Instruct"}
    with console.status("streaming"), instance(**options) as server:
        ours = measure_throughput(server, seconds)
        one = measure_one(server, requests)
    with console.status("baseline"), naive_server() as server:
        naive = measure_throughput(server, seconds)
    with (
        console.status("latency beside 256 streams"),
        instance(**options, fake_step_ms=STEP_MS, frontends=frontends) as server,
    ):
        raw, added = measure_loaded(server, seconds)
    show(ours, naive, one, raw, added, console)
    if json is not None:
        figures = {
            "tokens_per_core": ours.per_core, "baseline_tokens_per_core": naive.per_core,
            "throughput": asdict(ours), "one": asdict(one), "loaded_raw": asdict(raw),
            "loaded_added": asdict(added),
        }  # fmt: skip
        json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)))


if __name__ == "__main__":
    sys.exit(cyclopts.run(main))
