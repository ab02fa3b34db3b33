"""Kills and freezes random processes of a loaded instance: `python -m benchmarks.chaos`.

Every answer is compared with the undisturbed one. Exit code 1: a text or a count was wrong, a
request failed for no reason that a client must expect, or something was left behind.
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

from benchmarks.chaos.causes import find_cause
from benchmarks.chaos.clients import client
from benchmarks.chaos.losses import Chaos
from benchmarks.chaos.report import Figures, make_figures, show
from benchmarks.clients.known import Known, Tally, undisturbed, unsteady
from benchmarks.clients.requests import Failure, make_requests
from benchmarks.leaks import SHARED_MEMORY, held_when_idle, left_after_end
from benchmarks.servers import end_daemon, free_port, started
from benchmarks.tiny_model import make_tiny_model

CLIENTS: Final = 16
OPTIONS: Final[dict[str, object]] = {
    "dp": 2, "frontends": 2, "tokenizers": 2, "hang_seconds": 2, "heartbeat_seconds": 0.25,
    "dtype": "float32", "accelerator": "cpu", "kv_cache_gb": 0.01,
}  # fmt: skip

log = logging.getLogger(__name__)


async def disturb(chaos: Chaos, known: list[Known], seconds: float, seed: int) -> Tally:
    """Clients and losses at once, then calm until all losses are recovered from."""
    tally = Tally()
    end = time.monotonic() + seconds
    watch = asyncio.create_task(chaos.watch())
    clients = [
        asyncio.create_task(client(chaos, known, tally, seed * 1000 + number, end))
        for number in range(CLIENTS)
    ]
    await chaos.hit(seconds)
    await asyncio.gather(*clients)
    chaos.going = False
    await watch
    return tally


def blame(chaos: Chaos, tally: Tally) -> list[Failure]:
    """Find the loss behind each failure, now that the times of all losses are known; returns those
    without one."""
    unexplained = []
    for failure in tally.failures:
        cause = find_cause(failure, chaos.losses)
        if cause is not None:
            cause.errors += 1
            continue
        unexplained.append(failure)
        log.error("unexplained: %s after %.1f s: %s; felt then: %s", failure.kind,
                  failure.ended - failure.began, failure.asked,
                  chaos.around(failure.began, failure.ended))  # fmt: skip
    return unexplained


def run(
    folder: Path,
    model: Path | str,
    seed: int,
    kinds: int,
    minutes: float,
    every: float,
    console: Console,
) -> Figures:
    shared_before = set(SHARED_MEMORY.iterdir())
    port = free_port()
    options = {**OPTIONS, "model": model}
    if isinstance(model, str):
        del options["kv_cache_gb"]
    with started(folder, port, options) as daemon:
        chaos = Chaos(port, folder / "run", every, random.Random(seed))
        with console.status("asking undisturbed"):
            known = asyncio.run(undisturbed(port, make_requests(seed, kinds), random.Random(seed)))
            changing = asyncio.run(unsteady(port, known, rounds=4))
        console.print(
            f"undisturbed: {kinds} kinds of requests, {len(changing)} differing answers in company"
        )
        steady = [entry for entry in known if entry not in changing]
        with console.status(f"chaos for {minutes:g} minutes"):
            tally = asyncio.run(disturb(chaos, steady, minutes * 60, seed))
        leaks = held_when_idle(folder / "run", 5.0)
        chaos.processes()
        leaks |= end_daemon(daemon)
        leaks |= left_after_end(daemon.pid, folder / "run", chaos.pids, shared_before)
    return make_figures(
        seed=seed, minutes=minutes, model=Path(model).name, kinds=kinds,
        unsteady=kinds - len(steady), tally=tally, losses=chaos.losses,
        unexplained=blame(chaos, tally), leaks=leaks,
    )  # fmt: skip


def main(
    *,
    minutes: float = 10.0,
    every: float = 4.0,
    seed: int = 1,
    kinds: int = 40,
    model: str | None = None,
    json: Path | None = None,
    log_file: Path | None = None,
) -> int:
    """Run the chaos.

    Parameters
    ----------
    minutes
        Duration of the disturbance.
    every
        Mean seconds between two losses.
    seed
        Of requests, clients and losses.
    kinds
        How many different requests.
    model
        What `deepinfer serve --model` takes; default: a tiny random model made for the run.
    json
        Write the figures to this file.
    log_file
        Keep the instance's log here.
    """
    logging.basicConfig(format="%(asctime)s %(message)s")
    console = Console(highlight=False)
    folder = Path(tempfile.mkdtemp(prefix="di-chaos-"))
    try:
        chosen: Path | str = folder / "tiny-llama" if model is None else model
        if isinstance(chosen, Path):
            chosen.mkdir()
            make_tiny_model(chosen)
        figures = run(folder, chosen, seed, kinds, minutes, every, console)
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
