"""A step as a model gets it: the host's view of its rows, and the device's.

A step is a flattened batch without padding: T rows (tokens) of B sequences, the rows of one sequence
consecutive. R of its rows have logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from workers.contract import StepPlan

IntArray = npt.NDArray[np.int32]


class StepUpload(Protocol):
    """Collects the host's arrays for a step and copies them to the device in one transfer."""

    def put(self, array: IntArray) -> Tensor:
        """Return the int32 1-D tensor that will hold the array on the device.

        Its content is valid from the moment this step's upload is sent until the next step's is.
        """
        ...


class Segment(NamedTuple):
    """The rows of one sequence, at positions start .. start+rows-1."""

    slot: int
    first_row: int
    start: int
    rows: int
    """Number of rows."""
    replay_from: int = 0
    """First position that decoder layers run on, for models with bounded replay."""

    @property
    def end(self) -> int:
        return self.start + self.rows


class LogitRow(NamedTuple):
    segment: int
    """Index into `Batch.segments`."""
    position: int


@dataclass(frozen=True)
class Batch:
    """What the host knows of a step. Never empty."""

    plan: StepPlan
    segments: tuple[Segment, ...]
    logit_rows: tuple[LogitRow, ...]
    """Ascending by segment, then by position."""


@dataclass(frozen=True)
class BatchTensors:
    """The device's side of `Batch`."""

    token_ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T]. -1: a row that pads a decode step, which belongs to no sequence and yields nothing."""
    row_slots: Tensor
    """int64 [T]: the slot of each row's sequence."""
    slots: Tensor
    """int64 [B]: the slot of each sequence."""
    logit_rows: Tensor
    """int64 [R]."""
    block_table: Tensor
    """int32 [slots, max_pages]: covers all slots and includes the pages of this step."""
