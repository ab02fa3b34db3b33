"""The parts of the soak that act: clients that ask known turns, a killer of workers, a watch on memory."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.clients.requests import Answer, Asked, Failure, ask
from benchmarks.prefix.turns import KnownTurn, KnownTurns
from daemon.cli.check.api_client import ApiClient
from daemon.inspection.inspection_client import InspectionClient

LEAVING: Final = 0.08
"""Share of the requests whose client goes away."""
GOING_ON: Final = 0.7
"""Share of the turns after which a client asks the next one of the conversation."""
SALTS: Final = ("", "", "", "another tenant")
RETRY_SECONDS: Final = 0.3
PROGRESS_SECONDS: Final = 1.0
MEMORY_SECONDS: Final = 2.0

log = logging.getLogger(__name__)


@dataclass
class SoakTally:
    """What became of the turns."""

    started: int = 0
    asked: int = 0
    """Ended, one way or another."""
    left: int = 0
    wrong: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)


class Clients:
    """Ask known turns at once until there are enough."""

    def __init__(
        self, port: int, known: KnownTurns, seed: int, turns: int | None, seconds: float | None
    ) -> None:
        self.tally = SoakTally()
        self._port = port
        self._known = known
        self._seed = seed
        self._turns = turns
        self._seconds = seconds
        self._began = time.monotonic()

    @property
    def share_done(self) -> float:
        done = 0.0 if self._turns is None else self.tally.asked / self._turns
        if self._seconds is not None:
            done = max(done, (time.monotonic() - self._began) / self._seconds)
        return min(done, 1.0)

    async def run(self, count: int) -> None:
        self._began = time.monotonic()
        await asyncio.gather(*(self._ask_on(number) for number in range(count)))

    async def _ask_on(self, number: int) -> None:
        draw = random.Random(self._seed * 1000 + number)
        while not self._over():
            conversation = draw.choice(self._known.conversations)
            at = draw.randrange(len(conversation))
            while at < len(conversation) and not self._over():
                self.tally.started += 1
                await self._ask(conversation[at], draw)
                at = at + 1 if draw.random() < GOING_ON else len(conversation)

    def _over(self) -> bool:
        enough = self._turns is not None and self.tally.started >= self._turns
        return enough or self.share_done >= 1.0

    async def _ask(self, turn: KnownTurn, draw: random.Random) -> None:
        body: dict[str, Any] = dict(turn.asked.body)
        salt = draw.choice(SALTS)
        if salt:
            body["cache_salt"] = salt
        asked = Asked(turn.asked.path, body)
        leave_after = draw.randrange(2000) if draw.random() < LEAVING else None
        began = time.monotonic()
        answer = await ask(self._port, asked, draw.random() < 0.6, leave_after)
        self.tally.asked += 1
        if answer is None:
            self.tally.left += 1
        elif answer.complete:
            self._judge(turn, answer)
        else:
            self.tally.errors[Failure(asked, answer, began, time.monotonic()).kind] += 1
            await asyncio.sleep(RETRY_SECONDS)

    def _judge(self, turn: KnownTurn, answer: Answer) -> None:
        tally = self.tally
        if answer.result() != turn.result:
            tally.wrong += 1
            log.error("wrong: %s\n  wanted %s\n  got %s", turn.asked, turn.result, answer)
        tally.hits += answer.cached > 0
        tally.hit_tokens += answer.cached
        tally.prompt_tokens += answer.usage[0] if answer.usage else 0


class Instance:
    """A look at the running instance from outside."""

    def __init__(self, port: int, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._port = port
        self.pids: set[int] = set()
        """All process ids that it ever had, as far as seen."""

    def processes(self) -> list[dict[str, Any]]:
        with InspectionClient(self._run_dir, "bench") as client:
            rows: list[dict[str, Any]] = msgspec.json.decode(client.ask("processes", 5.0))
        self.pids |= {row["pid"] for row in rows if row["pid"] is not None}
        return rows

    def metrics(self) -> dict[tuple[str, str], float]:
        """Value by name without prefix and rank."""
        with ApiClient(f"http://127.0.0.1:{self._port}") as client:
            text = client.get("/metrics").decode()
        return {
            (sample.name.removeprefix("deepinfer:"), sample.labels.get("rank", "")): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


class Killer:
    """Ends a worker every `every` seconds or so, once all are there, so that somebody serves; 0: never.
    The one that has served longest goes: what it has stored is worth most."""

    def __init__(self, instance: Instance, every: float, seed: int) -> None:
        self._instance = instance
        self._every = every
        self._draw = random.Random(seed)
        self.kills = 0
        self.recovered_pages = 0
        """Pages that successors found in their pools, summed."""
        self._successors: set[str] = set()

    async def run(self) -> None:
        while self._every:
            await asyncio.sleep(self._every * self._draw.uniform(0.5, 1.5))
            rows = await asyncio.to_thread(self._instance.processes)
            workers = [row for row in rows if row["role"] == "worker"]
            if all(row["state"] == "ready" for row in workers):
                row = max(workers, key=lambda row: row["uptime_seconds"])
                rank = row["name"].partition("/")[2]
                await asyncio.to_thread(self._note_recovered, rank)
                if _kill(row["pid"]):
                    self.kills += 1
                    self._successors.add(rank)

    def finish(self) -> None:
        for rank in sorted(self._successors):
            self._note_recovered(rank)

    def _note_recovered(self, rank: str) -> None:
        if rank in self._successors:
            metrics = self._instance.metrics()
            self.recovered_pages += int(metrics.get(("hicache_recovered_pages", rank), 0))
            self._successors.discard(rank)


def _kill(pid: int) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        return False
    finally:
        os.close(pidfd)
    return True


class MemoryWatch:
    """Peak of the private memory by role, in the two halves of the run. The first fifth, in which
    everything is new, does not count."""

    def __init__(self, instance: Instance, share_done: Callable[[], float]) -> None:
        self._instance = instance
        self._share_done = share_done
        self.peaks: tuple[dict[str, int], dict[str, int]] = ({}, {})
        """Bytes, by role."""

    async def run(self) -> None:
        while True:
            await asyncio.sleep(MEMORY_SECONDS)
            share = self._share_done()
            if share >= 0.2:
                rows = await asyncio.to_thread(self._instance.processes)
                self._note(self.peaks[share >= 0.6], rows)

    def _note(self, peaks: dict[str, int], rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if row["pid"] is None:
                continue
            try:
                used = psutil.Process(row["pid"]).memory_info()
            except psutil.NoSuchProcess:
                continue
            # The pool is shared memory, and no leak when it fills.
            peaks[row["role"]] = max(peaks.get(row["role"], 0), used.rss - used.shared)
