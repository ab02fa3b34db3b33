"""A step on its way: its kind is chosen, it is filled, committed and launched, and its tokens come back."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from workers.contract import LaunchedStep, StepPlan, TokenLogprobs
from workers.scheduling.sequence import Sequence


class StepKind(enum.Enum):
    """What all sequences of a step have in common."""

    PROMPT = "prompt"
    DECODE = "decode"
    IDLE = "idle"
    """A placeholder: nothing is computed."""


class StepRow(NamedTuple):
    """Positions start .. stop-1 of one sequence."""

    sequence: Sequence
    epoch: int
    """Epoch of the sequence when the step was filled."""
    start: int
    stop: int


@dataclass(frozen=True)
class StepDraft:
    """A filled step that may be committed or dropped. Without rows it is a placeholder."""

    kind: StepKind
    rows: tuple[StepRow, ...] = ()


@dataclass
class InFlightStep:
    """A committed step, until its tokens are applied."""

    plan: StepPlan
    waiting: tuple[StepRow, ...]
    """Who gets the tokens, in the order of the plan."""
    started: tuple[Sequence, ...]
    """Sequences whose first chunk is in this step."""
    launched_at: float = 0.0
    """Seconds of the monotonic clock."""
    launched: LaunchedStep | None = None
    """Set by whoever launches the plan."""


class TokenRow(NamedTuple):
    sequence: Sequence
    token: int
    finish: int
    """RUNNING, FINISH_STOP or FINISH_LENGTH."""
    logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class StepOutput:
    """What one collected step means to the clients."""

    step: InFlightStep
    rows: list[TokenRow]
