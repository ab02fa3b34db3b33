"""What hostile clients do to honest ones: `python -m benchmarks.hostile --minutes 5`.

Honest clients ask, first alone, then beside ten hostile ones. Exit code 1: an honest request was not
answered or not rightly, `/health` was silent, a process was lost, or something was left behind. The
ratio of the times to first token is told and decides nothing: it hangs on the machine.

The engine is the fake one at a fixed pace, as a GPU has it, so that a time to first token is that of
everything around the engine and not of a model on the same cores. Its tokens depend on all tokens before
them, so that every text can be compared with the one that came undisturbed.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Final

import cyclopts
import msgspec
import psutil
from rich.console import Console

from benchmarks.clients.known import Known, undisturbed
from benchmarks.hostile.attacks import run_hostile
from benchmarks.hostile.bodies import write_large
from benchmarks.hostile.honest import Group, honest_requests, run_group
from benchmarks.hostile.report import Figures, Memory, Phase, make_phase, show
from benchmarks.hostile.watch import Watch, memory
from benchmarks.leaks import held_when_idle
from benchmarks.servers import ServeOptions, end_daemon, free_port, served_options, started

GROUPS: Final = 2
"""Processes of honest clients."""
KINDS: Final = 40
SETTLE_SECONDS: Final = 5.0
MIB: Final = 1 << 20
OPTIONS: Final[dict[str, object]] = {
    "engine": "fake", "fake_checking": True, "fake_step_ms": 20, "max_num_seqs": 256,
    # Prompts of 30 MB are not refused at once: they are encoded until their clients have left.
    "max_model_len": 8_000_000,
}  # fmt: skip


class Run:
    """An instance under load, and the processes that load it."""

    def __init__(
        self, port: int, known: list[Known], clients: int, seed: int, pool: ProcessPoolExecutor
    ) -> None:
        self._port = port
        self._known = known
        self._clients = clients
        self._seed = seed
        self._pool = pool

    def phase(
        self, daemon: psutil.Process, seconds: float, beside: Callable[[], object] = lambda: None
    ) -> tuple[Phase, Watch]:
        """`beside` starts what runs beside the honest clients."""
        began = time.monotonic()
        with Watch(self._port, daemon) as watch:
            beside()
            share, more = divmod(self._clients, GROUPS)
            futures = [
                self._pool.submit(
                    run_group, self._port, self._known, share + (number < more),
                    self._seed * GROUPS + number, seconds,
                )
                for number in range(GROUPS)
            ]  # fmt: skip
            groups: list[Group] = [future.result() for future in futures]
        return make_phase(groups, watch, time.monotonic() - began), watch


def run(
    folder: Path,
    options: dict[str, object],
    clients: int,
    minutes: float,
    seed: int,
    console: Console,
) -> Figures:
    port = free_port()
    seconds = minutes * 60
    load_before = os.getloadavg()[0]
    with console.status("building the bodies"):
        write_large(folder)
    pool = ProcessPoolExecutor(GROUPS + 1, multiprocessing.get_context("spawn"))
    with started(folder, port, options) as process, pool:
        daemon = psutil.Process(process.pid)
        children = {child.pid for child in daemon.children()}
        with console.status("asking undisturbed"):
            known = asyncio.run(
                undisturbed(port, honest_requests(seed, KINDS), random.Random(seed))
            )
        load = Run(port, known, clients, seed, pool)
        with console.status(f"{clients} honest clients alone, {minutes:g} minutes"):
            alone, _ = load.phase(daemon, seconds)
        before = memory(daemon)
        attacks = []
        with console.status(f"beside hostile clients, {minutes:g} minutes"):
            beside, watch = load.phase(
                daemon, seconds,
                lambda: attacks.append(pool.submit(run_hostile, port, folder, seconds)),
            )  # fmt: skip
        outcomes = attacks[0].result()
        load_after = os.getloadavg()[0]
        held = held_when_idle(folder / "run", 4 * SETTLE_SECONDS)
        time.sleep(SETTLE_SECONDS)  # a moment of peace, in which memory may go back
        after = memory(daemon)
        lost = children - {child.pid for child in daemon.children()}
        held |= end_daemon(process)
    names = before | watch.most | after
    return Figures(
        clients=clients, cores=os.cpu_count() or 0, load_before=load_before, load_after=load_after,
        alone=alone, beside=beside, attacks=by_attack(outcomes), replaced=losses(folder, lost), held=held,
        memory={
            name: Memory(*(sizes.get(name, 0) // MIB for sizes in (before, watch.most, after)))
            for name in names
        },
    )  # fmt: skip


def by_attack(outcomes: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for (name, outcome), count in outcomes.items():
        found.setdefault(name, {})[outcome] = count
    return found


def losses(folder: Path, pids: set[int]) -> list[str]:
    """What the log says of processes that are no longer there."""
    if not pids:
        return []
    lines = (folder / "log").read_text(errors="replace").splitlines()
    return [line for line in lines if " daemon " in line and "killed" in line] or list(
        map(str, pids)
    )


def main(
    *,
    minutes: float = 5.0,
    clients: int = 200,
    seed: int = 1,
    serve: ServeOptions = "",
    json: Path | None = None,
    log_file: Path | None = None,
) -> int:
    """Run honest clients alone, then beside hostile ones.

    Parameters
    ----------
    minutes
        Duration of each of the two.
    clients
        How many are honest.
    seed
        Of requests and clients.
    serve
        Further options of `deepinfer serve`.
    json
        Write the figures to this file.
    log_file
        Keep the instance's log here.
    """
    console = Console(highlight=False)
    folder = Path(tempfile.mkdtemp(prefix="di-hostile-"))
    try:
        figures = run(folder, OPTIONS | served_options(serve), clients, minutes, seed, console)
    finally:
        with contextlib.suppress(OSError):
            if log_file is not None:
                shutil.copy(folder / "log", log_file)
        shutil.rmtree(folder, ignore_errors=True)
    show(figures, console)
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)))
    return 0 if figures.passed else 1


if __name__ == "__main__":
    sys.exit(cyclopts.run(main))
