"""Honest clients: they ask, read what comes, think, and ask again. Each group is a process of its own."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Final

from benchmarks.clients.known import Known, Tally, judge
from benchmarks.clients.requests import Asked, Failure, ask, make_requests

LENGTHS: Final = (8, 16, 24, 32, 48)
METADATA: Final = {"notes": "word " * 20_000}
THINK_SECONDS: Final = 4.0
"""Mean time from an answer to the next request."""


def honest_requests(seed: int, count: int) -> list[Asked]:
    """An eighth of them have bodies of 100 KB, as the history of a conversation may have."""
    return [
        Asked(asked.path, asked.body | {"metadata": METADATA}, asked.wants_stop)
        if number % 8 == 7
        else asked
        for number, asked in enumerate(make_requests(seed, count, LENGTHS))
    ]


@dataclass
class Group:
    """What became of the requests of one process."""

    tally: Tally = field(default_factory=Tally)
    first_texts: list[float] = field(default_factory=list)
    """Seconds to the first text of the requests that were answered."""


def run_group(port: int, known: list[Known], clients: int, seed: int, seconds: float) -> Group:
    """The work of a process."""
    return asyncio.run(_run_group(port, known, clients, seed, seconds))


async def _run_group(
    port: int, known: list[Known], clients: int, seed: int, seconds: float
) -> Group:
    group = Group()
    end = time.monotonic() + seconds
    draws = (random.Random(seed * 1000 + number) for number in range(clients))
    await asyncio.gather(*(_client(port, known, group, draw, end) for draw in draws))
    return group


async def _client(
    port: int, known: list[Known], group: Group, draw: random.Random, end: float
) -> None:
    # Those who come last begin later than the first: nobody asks in step with the others.
    await asyncio.sleep(draw.uniform(0.0, THINK_SECONDS))
    while time.monotonic() < end:
        entry = draw.choice(known)
        began = time.monotonic()
        answer = await ask(port, entry.asked, stream=True)
        assert answer is not None
        group.tally.requests += 1
        if not judge(entry, answer, group.tally):
            group.tally.failures.append(Failure(entry.asked, answer, began, time.monotonic()))
        elif answer.first_text_seconds is not None:
            group.first_texts.append(answer.first_text_seconds)
        await asyncio.sleep(draw.expovariate(1 / THINK_SECONDS))
