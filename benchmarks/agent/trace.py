"""Made-up sessions of agents: growing conversations over one system prompt, with times to think."""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec

from daemon.cli.check.sample_text import SampleText


class TraceTurn(msgspec.Struct, frozen=True):
    """One turn of a session."""

    think_seconds: float
    """Before it, since the last answer; of the first one: since the start of the run."""
    user: str
    output_tokens: int
    assistant: str
    """What the history says that the answer was."""


class TraceSession(msgspec.Struct, frozen=True):
    """One agent."""

    turns: list[TraceTurn]


@dataclass(frozen=True)
class TraceShape:
    """Lengths in tokens, about; times in seconds. Means: draws lie between half and 1.5 times."""

    sessions: int
    turns: int
    system_tokens: int
    first_tokens: int
    turn_tokens: int
    output_tokens: int
    think_seconds: float
    spread_seconds: float


def make_trace(
    shape: TraceShape, text: SampleText, draw: random.Random
) -> tuple[str, list[TraceSession]]:
    def around(mean: float) -> float:
        return mean * draw.uniform(0.5, 1.5)

    system = text.words(shape.system_tokens)
    sessions = []
    for _ in range(shape.sessions):
        turns = []
        for number in range(shape.turns):
            length = shape.turn_tokens if number else shape.first_tokens
            output = max(1, round(around(shape.output_tokens)))
            wait = around(shape.think_seconds) if number else draw.uniform(0, shape.spread_seconds)
            user = text.words(round(around(length)))
            turns.append(TraceTurn(wait, user, output, text.words(output)))
        sessions.append(TraceSession(turns))
    return system, sessions
