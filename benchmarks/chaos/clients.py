"""Clients of the chaos run: they ask without end, and judge every answer."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import dataclass, field
from typing import Final

from benchmarks.chaos.losses import Chaos
from benchmarks.clients.requests import Answer, Asked, Failure, ask, with_stop

RETRY_SECONDS: Final = 0.3
LEAVING: Final = 0.12
"""Share of the requests whose client goes away."""

log = logging.getLogger(__name__)


@dataclass
class Tally:
    """What became of the requests."""

    requests: int = 0
    completed: int = 0
    left: int = 0
    wrong: list[str] = field(default_factory=list)
    """Whole answers that differ, and parts of answers that are no beginning of the right one."""
    counted_twice: int = 0
    """Answers whose usage exceeds that of the undisturbed one."""
    failures: list[Failure] = field(default_factory=list)
    tokens: int = 0


@dataclass(frozen=True)
class Known:
    """A request and its undisturbed answer."""

    asked: Asked
    answer: Answer


async def undisturbed(port: int, requests: list[Asked], draw: random.Random) -> list[Known]:
    """Ask one request after the other.

    Raises:
        RuntimeError: one failed.
    """
    known = []
    for plain in requests:
        asked = with_stop(plain, await _must(port, plain), draw) if plain.wants_stop else plain
        known.append(Known(asked, await _must(port, asked)))
    return known


async def _must(port: int, asked: Asked) -> Answer:
    answer = await ask(port, asked, stream=False)
    if answer is None or not answer.complete:
        raise RuntimeError(f"an undisturbed request failed: {asked} {answer}")
    return answer


async def unsteady(port: int, known: list[Known], rounds: int) -> list[Known]:
    """The requests whose answers change in company: losses cannot be blamed for a difference
    there."""
    room = asyncio.Semaphore(16)

    async def differs(entry: Known, stream: bool) -> bool:
        async with room:
            answer = await ask(port, entry.asked, stream)
            return answer is None or answer.result() != entry.answer.result()

    found = []
    for number in range(rounds):
        results = await asyncio.gather(*(differs(entry, bool(number % 2)) for entry in known))
        found += [entry for entry, differed in zip(known, results, strict=True) if differed]
    return found


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


def judge(entry: Known, answer: Answer, tally: Tally) -> bool:
    """Count an answer and say whether it was whole."""
    wanted = entry.answer
    used, allowed = answer.usage, wanted.usage
    if used is not None and allowed is not None and used[1] > allowed[1]:
        tally.counted_twice += 1
    right = answer.result() == wanted.result() if answer.complete else answer.is_begun(wanted)
    if not right:
        tally.wrong.append(f"{entry.asked}\n  wanted {wanted}\n  got    {answer}")
        log.error("wrong: %s", tally.wrong[-1])
    if answer.complete:
        tally.completed += 1
        tally.tokens += used[1] if used else 0
    return answer.complete
