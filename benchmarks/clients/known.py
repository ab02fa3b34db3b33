"""Requests with their undisturbed answers, and the judgement of later answers by these."""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass, field

from benchmarks.clients.requests import Answer, Asked, Failure, ask, with_stop

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
