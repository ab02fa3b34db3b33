"""Copies of neighbouring rows merged into runs: one run is one stretch of bytes on either side."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IndexArray = npt.NDArray[np.int32]


class RowRuns(NamedTuple):
    """Runs of rows: device rows `device[i]` .. `device[i] + length[i] - 1` pair with the host rows
    from `host[i]` on. int64, shape [runs] each."""

    device: npt.NDArray[np.int64]
    host: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]


def merge_runs(device_rows: IndexArray, host_rows: IndexArray) -> RowRuns:
    """Merge pairs of rows, int32 [n] each, into the fewest runs, whatever order the pairs come in.

    Pairs can share a run when their rows are equally far apart on both sides, so sorted by that
    distance and then by row, the pairs of a run follow each other.
    """
    device, host = device_rows.astype(np.int64), host_rows.astype(np.int64)
    order = np.lexsort((host, device - host))
    device, host = device[order], host[order]
    follows = (np.diff(device) == 1) & (np.diff(host) == 1)
    starts = np.flatnonzero(np.concatenate(([True], ~follows))) if len(host) else order
    lengths = np.diff(np.append(starts, len(host)))
    return RowRuns(device[starts], host[starts], lengths)
