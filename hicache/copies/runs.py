"""Copies of neighbouring rows merged into runs: one run is one stretch of bytes on either side."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IndexArray = npt.NDArray[np.int32]


class RowRuns(NamedTuple):
    """Runs of rows: the rows `here[i]` .. `here[i] + length[i] - 1` pair with those from `there[i]` on.
    int64, shape [runs] each."""

    here: npt.NDArray[np.int64]
    there: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]


def merge_runs(here: IndexArray, there: IndexArray) -> RowRuns:
    """Merge pairs of rows, int32 [n] each, into the fewest runs, whatever order the pairs come in.

    Pairs can share a run when their rows are equally far apart on both sides, so sorted by that
    distance and then by row, the pairs of a run follow each other.
    """
    near, far = here.astype(np.int64), there.astype(np.int64)
    order = np.lexsort((far, near - far))
    near, far = near[order], far[order]
    follows = (np.diff(near) == 1) & (np.diff(far) == 1)
    starts = np.flatnonzero(np.concatenate(([True], ~follows))) if len(far) else order
    lengths = np.diff(np.append(starts, len(far)))
    return RowRuns(near[starts], far[starts], lengths)
