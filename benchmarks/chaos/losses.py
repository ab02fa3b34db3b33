"""Kills and freezes processes of an instance, and measures how long each loss is felt."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.chaos.causes import Loss
from benchmarks.clients.requests import Asked, ask, get_status
from daemon.errors import DeepInferError
from daemon.inspection.inspection_client import InspectionClient

LOOK_SECONDS: Final = 0.1
CALM_SECONDS: Final = 120.0
"""How long the instance may take to recover from the last losses."""
PROBE: Final = Asked("/v1/completions", {"prompt": "hello", "max_tokens": 2, "temperature": 0})

log = logging.getLogger(__name__)


@dataclass
class Chaos:
    """Hits a random process every `every` seconds or so while `going`; watches until all is well."""

    port: int
    run_dir: Path
    every: float
    draw: random.Random
    losses: list[Loss] = field(default_factory=list)
    pids: set[int] = field(default_factory=set)
    """All process ids that the instance ever had, as far as seen."""
    going: bool = True

    def processes(self) -> list[dict[str, Any]]:
        """The daemon's view of all processes; empty if it does not answer."""
        try:
            with InspectionClient(self.run_dir, "bench") as client:
                rows: list[dict[str, Any]] = msgspec.json.decode(client.ask("processes", 5.0))
        except DeepInferError as error:
            log.error("the daemon does not answer: %s", error)
            return []
        self.pids |= {row["pid"] for row in rows if row["pid"] is not None}
        return rows

    async def hit(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while True:
            wait = self.every * self.draw.uniform(0.5, 1.5)
            if time.monotonic() + wait > end:
                return
            await asyncio.sleep(wait)
            self._hit_one(await asyncio.to_thread(self.processes))

    def _hit_one(self, rows: list[dict[str, Any]]) -> None:
        frozen = self.draw.random() < 0.3
        gone = {loss.pid for loss in self.losses}
        rows = [r for r in rows if r["role"] != "daemon" and r["pid"] not in {None, *gone}]
        if not rows:
            return
        row = self.draw.choice(rows)
        try:
            pidfd = os.pidfd_open(row["pid"])
            signal.pidfd_send_signal(pidfd, signal.SIGSTOP if frozen else signal.SIGKILL)
        except ProcessLookupError:
            return
        loss = Loss(row["name"], row["pid"], frozen, row["state"], time.monotonic())
        self.losses.append(loss)
        asyncio.get_running_loop().add_reader(pidfd, self._has_ended, loss, pidfd)

    def _has_ended(self, loss: Loss, pidfd: int) -> None:
        loss.ended_at = time.monotonic()
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)

    def note_success(self, began: float, ended: float) -> None:
        for loss in self.losses:
            if loss.served_after is None and loss.at <= began:
                loss.served_after = ended - loss.at

    async def watch(self) -> None:
        """Look at the instance while `going` and until it has recovered, at most `CALM_SECONDS`
        longer; note when it has recovered from each loss."""
        last = time.monotonic() + CALM_SECONDS
        while self.going or (not self.recovered and time.monotonic() < last):
            if self.going:
                last = time.monotonic() + CALM_SECONDS
            began = time.monotonic()
            rows = await asyncio.to_thread(self.processes)
            seen_at = time.monotonic()
            ready = await get_status(self.port, "/ready") == 200
            answer = await ask(self.port, PROBE, stream=False)
            served = answer is not None and answer.complete
            if served:
                self.note_success(began, time.monotonic())
            self._note(began, seen_at, rows, ready, served)
            await asyncio.sleep(LOOK_SECONDS)

    def _note(
        self, began: float, seen_at: float, rows: list[dict[str, Any]], ready: bool, served: bool
    ) -> None:
        now = time.monotonic()
        there = {r["name"]: r["pid"] for r in rows if r["state"] == "ready"}
        for loss in self.losses:
            if loss.recovered_after is not None or loss.at > began:
                continue
            replaced = there.get(loss.name) not in (None, loss.pid)
            if replaced and loss.replaced_after is None:
                loss.replaced_after = seen_at - loss.at
            # A successor that was hit as well is a loss of its own.
            if loss.replaced_after is not None and ready and served:
                loss.recovered_after = now - loss.at

    @property
    def recovered(self) -> bool:
        return all(loss.recovered_after is not None for loss in self.losses)

    def around(self, begin: float, end: float) -> str:
        return ", ".join(
            f"{x.name} {'frozen' if x.frozen else 'killed'} {end - x.at:.2f} s before"
            + ("" if x.ended_at is None else f", ended {end - x.ended_at:.2f} s before")
            for x in self.losses
            if x.at <= end and (x.recovered_after is None or x.at + x.recovered_after >= begin)
        )
