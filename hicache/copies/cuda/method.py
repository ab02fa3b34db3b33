"""Ways to copy runs of rows between a GPU's memory and page-locked memory: what each one is told.

No torch here: the protocols name the part of `torch.cuda` that is used, so that the order of copies and
steps can be tested without a GPU.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hicache.copies.row_copy import Direction
from hicache.copies.rows import Rows
from hicache.copies.runs import RowRuns
from hicache.errors import HostPoolError
from transport.wording import first_line

AddressArray = npt.NDArray[np.int64]


class CopyMethodMissing(HostPoolError):
    """This machine cannot copy this way; the message says what is missing, without a full stop."""


def import_package(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise CopyMethodMissing(f"the package {package} is missing") from error
    except Exception as error:  # a package for another CUDA raises whatever its modules do
        raise CopyMethodMissing(
            f"the package {package} cannot be imported ({first_line(error)})"
        ) from error


class CudaEvent(Protocol):
    """As `torch.cuda.Event`: a place in a stream."""

    def query(self) -> bool:
        """Whether the stream has passed it. Never blocks."""
        ...

    def elapsed_time(self, later: CudaEvent, /) -> float:
        """Milliseconds from here to `later`. Both are timed, recorded and passed."""
        ...


class CudaStream(Protocol):
    """As `torch.cuda.Stream`: a queue of work for the device."""

    @property
    def cuda_stream(self) -> int:
        """The driver's handle; 0: the legacy default stream."""
        ...

    def record_event(self) -> CudaEvent: ...

    def wait_event(self, event: CudaEvent) -> None:
        """Work given from now on starts when `event` is passed."""
        ...

    def synchronize(self) -> None: ...


@dataclass(frozen=True)
class RowPair:
    """Rows to copy between, equally long: on the GPU, and in page-locked memory."""

    here: Rows
    there: Rows

    def __post_init__(self) -> None:
        if self.here.row_bytes != self.there.row_bytes:
            raise ValueError(
                f"rows of {self.here.row_bytes} bytes here and of {self.there.row_bytes} bytes there"
            )

    @property
    def row_bytes(self) -> int:
        return self.here.row_bytes


class AddressRuns(NamedTuple):
    """Copies of bytes, int64 [n] each."""

    target: AddressArray
    source: AddressArray
    num_bytes: AddressArray


class CopyMethod(Protocol):
    """One way to copy. `start` returns before the copy is over."""

    def start(self, direction: Direction, runs: RowRuns, stream: CudaStream) -> None:
        """Put the copy of `runs`, at least one, into `stream`.

        Raises:
            HostPoolError: the driver refuses.
        """
        ...


def address_runs(rows: RowPair, direction: Direction, runs: RowRuns) -> AddressRuns:
    """Runs of rows as stretches of bytes: one a run, or one a row where rows have gaps between them."""
    if max(rows.here.pitch, rows.there.pitch) != rows.row_bytes:
        runs = single_rows(runs)
    here = rows.here.address + runs.here * rows.here.pitch
    there = rows.there.address + runs.there * rows.there.pitch
    num_bytes = runs.length * rows.row_bytes
    if direction == "load":
        return AddressRuns(here, there, num_bytes)
    return AddressRuns(there, here, num_bytes)


def single_rows(runs: RowRuns) -> RowRuns:
    starts = np.cumsum(runs.length) - runs.length
    within = np.arange(int(runs.length.sum())) - np.repeat(starts, runs.length)
    return RowRuns(
        np.repeat(runs.here, runs.length) + within,
        np.repeat(runs.there, runs.length) + within,
        np.ones(len(within), np.int64),
    )
