"""How fast the pipeline is without a model: `python -m benchmarks.pipeline [--json FILE]`.

Real instances over real HTTP, with the fake engine, whose tokens cost next to nothing:

1. Streaming: 256 streams as fast as they go. The frontend's own CPU seconds count, so that the other
   processes, which share the machine's cores, do not hide what one frontend can do. Beside it, with
   the same client: a server that does the usual per token, and one that does nothing but write.
2. Added latency of one request at a time, and what its six ZeroMQ hops cost without us.
3. Added latency beside 256 streams at a decode pace of 20 ms a step (see `latency.py`).
"""

from __future__ import annotations

import os
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

from benchmarks.clients.streams import OpenStream, StreamPool
from benchmarks.pipeline.hop_floor import round_trips
from benchmarks.pipeline.latency import (
    STEP_SECONDS,
    STREAMS,
    Latency,
    LoadedLatency,
    body,
    measure_clients,
    measure_one,
    measure_probes,
)
from benchmarks.servers import Served, baseline, instance

GOAL_TOKENS_PER_CORE = 150_000
GOAL_ONE_MS = 1.0
GOAL_LOADED_MS = 5.0
ROUND_TRIPS = 3
"""Of ZeroMQ in a request: frontend, router, tokenizer, router, worker, router, frontend."""


@dataclass
class Throughput:
    """Streaming for a while."""

    tokens: int
    reads: int
    wall_seconds: float
    cpu_seconds: dict[str, float]

    @property
    def per_core(self) -> float:
        """Tokens per second of the frontend's CPU time."""
        return self.tokens / self.cpu_seconds["frontend/0"]


@dataclass
class Figures:
    """Everything that one run measures."""

    ours: Throughput
    naive: Throughput
    naive_paced: Throughput
    writes: Throughput
    one: Latency
    six_hops_ms: float
    probes: LoadedLatency
    clients: LoadedLatency
    load_average: tuple[float, float, float]
    """The machine's at the end; its cores should have had nothing else to do."""
    cores: int


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
    events, reads = pool.events, pool.reads
    began, cpu = time.perf_counter(), server.cpu_seconds()
    read_until(began + seconds)
    wall = time.perf_counter() - began
    used = {name: after - cpu[name] for name, after in server.cpu_seconds().items()}
    counted = Throughput(pool.events - events, pool.reads - reads, wall, used)
    pool.close()
    return counted


def measure(requests: int, seconds: float, frontends: int, options: dict[str, object]) -> Figures:
    paced = {**options, "fake_step_ms": STEP_SECONDS * 1e3, "frontends": frontends}
    with instance(**options) as server:
        ours = measure_throughput(server, seconds)
        one = measure_one(server, requests)
    hops = statistics.median(round_trips(requests)) * ROUND_TRIPS * 1e3
    with baseline("benchmarks.pipeline.naive_stream") as server:
        naive = measure_throughput(server, seconds)
    with baseline("benchmarks.pipeline.naive_stream", str(STEP_SECONDS)) as server:
        naive_paced = measure_throughput(server, seconds)
    with baseline("benchmarks.pipeline.raw_stream") as server:
        writes = measure_throughput(server, seconds)
    # An instance each: the streams of one must not end within the other.
    with instance(**paced) as server:
        probes = measure_probes(server, seconds)
    with instance(**paced) as server:
        clients = measure_clients(server, seconds)
    return Figures(
        ours=ours,
        naive=naive,
        naive_paced=naive_paced,
        writes=writes,
        one=one,
        six_hops_ms=hops,
        probes=probes,
        clients=clients,
        load_average=os.getloadavg(),
        cores=os.cpu_count() or 0,
    )


def show(figures: Figures, console: Console) -> None:
    for table in (_goals(figures), _latencies(figures), _costs(figures.ours)):
        console.print(table)
    ours, floor = figures.ours, figures.writes.per_core
    paced = 1 / figures.probes.cpu_per_token
    cores = Table(
        "", "tokens/s per core", "ours is × of it", "tokens a read",
        title=f"One process that streams to {STREAMS} clients",
    )  # fmt: skip
    for name, rate, mine, reads in (
        ("full speed: ours", ours.per_core, ours.per_core, ours.tokens / ours.reads),
        ("full speed: a Starlette chunk a token", figures.naive.per_core, ours.per_core,
         figures.naive.tokens / figures.naive.reads),
        (f"{STEP_SECONDS * 1e3:g} ms a step: ours", paced, paced,
         1 / figures.probes.reads_per_token),
        (f"{STEP_SECONDS * 1e3:g} ms a step: a Starlette chunk a token",
         figures.naive_paced.per_core, paced,
         figures.naive_paced.tokens / figures.naive_paced.reads),
        ("nothing but a send a token", floor, paced, figures.writes.tokens / figures.writes.reads),
    ):  # fmt: skip
        cores.add_row(name, f"{rate:,.0f}", f"{mine / rate:.2f}", f"{reads:.1f}")
    console.print(cores)
    console.print(
        f"full speed by the clock: {ours.tokens / ours.wall_seconds:,.0f} tokens/s, all processes "
        f"and the client on {figures.cores} cores\n"
        f"one stream's p50 / its six ZeroMQ hops alone ({figures.six_hops_ms:.2f} ms): "
        f"{figures.one.p50 / figures.six_hops_ms:.2f}\n"
        f"load average {figures.load_average[0]:.1f}: other work on the machine makes all of this worse"
    )


def _goals(figures: Figures) -> Table:
    table = Table("", "measured", "goal", "", title=f"Pipeline without a model, {STREAMS} streams")

    def row(name: str, value: float, goal: float, text: Callable[[float], str], up: bool) -> None:
        met = value >= goal if up else value <= goal
        sign = "≥" if up else "≤"
        mark = "[green]met[/]" if met else "[red]missed[/]"
        table.add_row(name, text(value), f"{sign} {text(goal)}", mark)

    per_core, milliseconds = "{:,.0f}".format, "{:.2f} ms".format
    added = figures.probes.added
    assert added is not None
    # More tokens in one write cost less each, so a starved machine shows a better rate.
    ours = figures.ours
    piled = f"tokens/s per frontend core, {ours.tokens / ours.reads:.0f} tokens a read"
    row(piled, ours.per_core, GOAL_TOKENS_PER_CORE, per_core, True)
    row("added latency p50, 1 stream", figures.one.p50, GOAL_ONE_MS, milliseconds, False)
    row(f"added latency p50, {STREAMS} streams", added.p50, GOAL_LOADED_MS, milliseconds, False)
    return table


def _latencies(figures: Figures) -> Table:
    table = Table("", "p50", "p90", "p99", "requests", title="Time to first token, ms")

    def row(name: str, latency: Latency | None) -> None:
        if latency is not None:
            cells = (f"{v:.2f}" for v in (latency.p50, latency.p90, latency.p99))
            table.add_row(name, *cells, str(latency.count))

    row("1 stream, nothing taken off", figures.one)
    for name, loaded in (
        (f"probe beside {STREAMS} streams", figures.probes),
        (f"{STREAMS} clients", figures.clients),
    ):
        row(f"{name}, raw ({STEP_SECONDS * 1e3:g} ms a step)", loaded.raw)
        row(f"… less the engine's steps ({loaded.engine_share:.0%} of the time)", loaded.added)
        row("… less all time at the rank", loaded.outside)
    return table


def _costs(ours: Throughput) -> Table:
    table = Table("process", "CPU ms per 1000 tokens", title="Streaming at full speed")
    for name, seconds in ours.cpu_seconds.items():
        table.add_row(name, f"{seconds / ours.tokens * 1e6:.2f}")
    return table


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
        Duration of the streaming measurements and of the loaded latencies, each.
    frontends
        Frontend processes in the loaded latency measurements.
    model
        Directory whose tokenizer is used; default: the default model's.
    json
        Write the figures to this file.
    """
    console = Console(highlight=False)
    options: dict[str, object] = {"max_num_seqs": STREAMS + 8, "max_waiting": STREAMS}
    if model is not None:
        options |= {"model": model, "served_model_name": "SmolLM2-135M-Instruct"}
    with console.status("measuring: a minute or two"):
        figures = measure(requests, seconds, frontends, options)
    show(figures, console)
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(asdict(figures))))


if __name__ == "__main__":
    sys.exit(cyclopts.run(main))
