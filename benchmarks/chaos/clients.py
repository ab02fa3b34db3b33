"""Clients of the chaos run: they ask without end, and judge every answer."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Final

from benchmarks.chaos.losses import Chaos
from benchmarks.clients.known import Known, Tally, judge
from benchmarks.clients.requests import Failure, ask

RETRY_SECONDS: Final = 0.3
LEAVING: Final = 0.12
"""Share of the requests whose client goes away."""


async def client(chaos: Chaos, known: list[Known], tally: Tally, seed: int, end: float) -> None:
    draw = random.Random(seed)
    while time.monotonic() < end:
        entry = draw.choice(known)
        leave_after = draw.randrange(3000) if draw.random() < LEAVING else None
        began = time.monotonic()
        answer = await ask(chaos.port, entry.asked, draw.random() < 0.6, leave_after)
        tally.requests += 1
        if answer is None:
            tally.left += 1
        elif judge(entry, answer, tally):
            chaos.note_success(began, time.monotonic())
        else:
            tally.failures.append(Failure(entry.asked, answer, began, time.monotonic()))
            await asyncio.sleep(RETRY_SECONDS)
