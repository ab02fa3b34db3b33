"""Random turns without end, while workers are killed: `python -m benchmarks.prefix.soak`.

Conversations that share beginnings are made up and answered once with `"prefix_cache": false`. Then
clients ask their turns in random order through a pool that holds part of them, and every answer is
compared, while a worker is ended with SIGKILL every few seconds. Exit code 1: a text was wrong, a
request failed, or something was left behind.
"""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import cyclopts
import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.leaks import SHARED_MEMORY, held_when_idle, left_after_end
from benchmarks.prefix.soak_run import (
    PROGRESS_SECONDS,
    Clients,
    Instance,
    Killer,
    MemoryWatch,
)
from benchmarks.prefix.turns import KnownTurns, TurnMaker
from benchmarks.servers import end_daemon, free_port, started
from daemon.cli.check.api_client import ApiClient

TINY: Final = Path(__file__).parents[2] / "tests/data/v41_tiny"
OPTIONS: Final[dict[str, object]] = {
    "accelerator": "cpu", "dtype": "float32", "max_migrations": 100, "log_level": "warning",
}  # fmt: skip
TINY_OPTIONS: Final[dict[str, object]] = {
    # 44 pages of 96 KiB on the device and 65 on the host, 40 states.
    "yoco_keep_tokens": 24, "kv_cache_gb": 0.0043, "hicache_size_gb": 0.006,
    "hicache_state_slots": 40,
    # A random model has near ties, which would fall differently in other batches.
    "deterministic": True,
}  # fmt: skip
IDLE_SECONDS: Final = 15.0
READY_SECONDS: Final = 60.0
GROWTH: Final = 1.2
GROWTH_BYTES: Final = 32 << 20
"""Peak memory of the second half over that of the first, past which it counts as growing."""


class SoakFigures(msgspec.Struct, frozen=True):
    """Everything that is reported."""

    seed: int
    model: str
    minutes: float
    known_turns: int
    unclear_turns: int
    turns: int
    left_by_client: int
    wrong_texts: int
    errors: dict[str, int]
    hits: int
    hit_share: float
    """Cached over prompt tokens."""
    evicted_pages: int
    """Evictions by the workers that were alive at the end."""
    kills: int
    recovered_pages: int
    memory_mib: dict[str, tuple[float, float]]
    """Peak private memory by role: first half, second half."""
    leaks: dict[str, int]

    @property
    def passed(self) -> bool:
        return not (self.wrong_texts or self.errors or self.leaks)


def know_turns(port: int, conversations: int, seed: int, console: Console) -> KnownTurns:
    with (
        ApiClient(f"http://127.0.0.1:{port}") as client,
        Progress(console=console, transient=True) as progress,
    ):
        maker = TurnMaker(client, random.Random(seed))
        for _ in progress.track(range(conversations), description="asking without the cache"):
            maker.make()
    return maker.turns


async def soak(
    clients: Clients, count: int, killer: Killer, memory: MemoryWatch, console: Console
) -> None:
    others = [asyncio.create_task(work.run()) for work in (killer, memory)]
    shown = asyncio.create_task(show_progress(clients, killer, console))
    try:
        await clients.run(count)
    finally:
        for task in (*others, shown):
            task.cancel()
        for ended in await asyncio.gather(*others, shown, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended


async def show_progress(clients: Clients, killer: Killer, console: Console) -> None:
    """A line that is kept up to date; without a terminal, one line for every tenth of the run."""
    shown = 0.0
    tally = clients.tally
    began = time.monotonic()
    while True:
        await asyncio.sleep(PROGRESS_SECONDS)
        if not console.is_terminal and clients.share_done < shown + 0.1:
            continue
        shown = clients.share_done
        console.print(
            f"{shown:4.0%}  {tally.asked:,} turns in {time.monotonic() - began:.0f} s, "
            f"{tally.wrong} wrong, {tally.errors.total()} errors, "
            f"{tally.hit_tokens / max(tally.prompt_tokens, 1):.0%} hit tokens, {killer.kills} kills ",
            end="\r" if console.is_terminal else "\n",
        )


def calm_metrics(instance: Instance, ranks: int) -> dict[tuple[str, str], float]:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        metrics = instance.metrics()
        told = sum(name == "hicache_pages_used" for name, _ in metrics)
        if told == ranks and metrics.get(("instance_ready", "")) == 1:
            return metrics
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"the instance was not ready {READY_SECONDS:g} s after the last turn"
            )
        time.sleep(0.2)


def growing(memory: MemoryWatch) -> dict[str, int]:
    first, second = memory.peaks
    return {
        f"memory of {role}, MiB": (second[role] - first[role]) >> 20
        for role in first
        if second.get(role, 0) > GROWTH * first[role] + GROWTH_BYTES
    }


def run(
    folder: Path, options: dict[str, object], clients_at_once: int, conversations: int,
    turns: int | None, minutes: float | None, every: float, seed: int, console: Console,
) -> SoakFigures:  # fmt: skip
    shared_before = set(SHARED_MEMORY.iterdir())
    port = free_port()
    began = time.monotonic()
    with started(folder, port, options) as daemon:
        known = know_turns(port, conversations, seed, console)
        instance = Instance(port, folder / "run")
        clients = Clients(port, known, seed, turns, None if minutes is None else minutes * 60)
        killer = Killer(instance, every, seed)
        memory = MemoryWatch(instance, lambda: clients.share_done)
        asyncio.run(soak(clients, clients_at_once, killer, memory, console))
        metrics = calm_metrics(instance, int(str(options["dp"])))
        killer.finish()
        leaks = held_when_idle(folder / "run", IDLE_SECONDS) | growing(memory)
        restarts = sum(row["restarts"] for row in instance.processes())
        if restarts != killer.kills:
            leaks["restarts that nobody asked for"] = restarts - killer.kills
        pending = instance.metrics()
        stores = sum(v for (name, _), v in pending.items() if name == "hicache_pending_bytes")
        if stores:
            leaks["bytes of stores under way"] = int(stores)
        leaks |= end_daemon(daemon)
        leaks |= left_after_end(daemon.pid, folder / "run", instance.pids, shared_before)
    tally = clients.tally
    first, second = memory.peaks
    return SoakFigures(
        seed=seed, model=Path(str(options["model"])).name, minutes=(time.monotonic() - began) / 60,
        known_turns=known.count, unclear_turns=known.unclear, turns=tally.asked,
        left_by_client=tally.left, wrong_texts=tally.wrong, errors=dict(tally.errors),
        hits=tally.hits, hit_share=tally.hit_tokens / max(tally.prompt_tokens, 1),
        evicted_pages=int(sum(
            v for (name, _), v in metrics.items() if name == "hicache_evicted_pages_total"
        )),
        kills=killer.kills, recovered_pages=killer.recovered_pages,
        memory_mib={r: (first[r] / 2**20, second.get(r, 0) / 2**20) for r in sorted(first)},
        leaks=leaks,
    )  # fmt: skip


def show(figures: SoakFigures, console: Console) -> None:
    title = f"{figures.model}, {figures.minutes:.1f} minutes, seed {figures.seed}"
    table = Table("", "", title=title)
    for label, value in (
        ("turns", f"{figures.turns:,}"),
        ("  of so many different ones", f"{figures.known_turns:,}"),
        ("  left out, too close to call", f"{figures.unclear_turns:,}"),
        ("  left by the client", f"{figures.left_by_client:,}"),
        ("wrong texts (0)", f"{figures.wrong_texts:,}"),
        ("errors (0)", f"{sum(figures.errors.values()):,}"),
        ("hits", f"{figures.hits:,}"),
        ("prompt tokens from the cache", f"{figures.hit_share:.1%}"),
        ("pages evicted by the last workers", f"{figures.evicted_pages:,}"),
        ("workers killed", f"{figures.kills:,}"),
        ("pages recovered by their successors", f"{figures.recovered_pages:,}"),
        ("leaks (0)", f"{len(figures.leaks):,}"),
    ):
        table.add_row(label, value)
    console.print(table)
    memory = Table("role", "first half", "second half", title="Peak private memory, MiB")
    for role, peaks in figures.memory_mib.items():
        memory.add_row(role, *(f"{peak:,.0f}" for peak in peaks))
    console.print(memory)
    for name, count in (figures.errors | figures.leaks).items():
        console.print(f"[red]{name}:[/] {count}")
    console.print("[green]passed[/]" if figures.passed else "[red]failed[/]")


def main(
    *,
    turns: int | None = None,
    minutes: float | None = None,
    every: float = 15.0,
    seed: int = 1,
    conversations: int = 40,
    clients: int = 8,
    dp: int = 2,
    model: str | None = None,
    hicache_size_gb: float | None = None,
    json: Path | None = None,
    log_file: Path | None = None,
) -> int:
    """Run the soak.

    Parameters
    ----------
    turns
        How many to ask; default: 10 000, or as many as fit into --minutes.
    minutes
        How long to ask, at most.
    every
        Mean seconds between two kills; 0: none.
    seed
        Of conversations, clients and kills.
    conversations
        How many different ones.
    clients
        How many ask at once.
    dp
        Workers.
    model
        What `deepinfer serve --model` takes; default: the tiny DeepSeek-V4.1 of the tests.
    hicache_size_gb
        Of each worker's pool; default: what makes the tiny model evict.
    json
        Write the figures to this file.
    log_file
        Keep the instance's log here.
    """
    logging.basicConfig(format="%(asctime)s %(message)s")
    console = Console(highlight=False)
    options = {**OPTIONS, "model": model or TINY, "dp": dp}
    if model is None:
        options |= TINY_OPTIONS
    if hicache_size_gb is not None:
        options["hicache_size_gb"] = hicache_size_gb
    if turns is None and minutes is None:
        turns = 10_000
    folder = Path(tempfile.mkdtemp(prefix="di-soak-"))
    try:
        figures = run(folder, options, clients, conversations, turns, minutes, every, seed, console)
    finally:
        if log_file is not None and (folder / "log").exists():
            shutil.copy(folder / "log", log_file)
        shutil.rmtree(folder, ignore_errors=True)
    show(figures, console)
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)))
    return 0 if figures.passed else 1


if __name__ == "__main__":
    sys.exit(cyclopts.run(main))
