"""One copy of torch's a run: needs no package, and takes long to start many."""

from __future__ import annotations

import torch

from hicache.copies.cuda.method import CudaStream
from hicache.copies.cuda.rows import GpuRows
from hicache.copies.row_copy import Direction
from hicache.copies.rows import HostRows
from hicache.copies.runs import RowRuns


class SingleCopies:
    """`CopyMethod` by torch."""

    def __init__(self, here: GpuRows, there: HostRows) -> None:
        self._here = here.memory
        self._there = torch.from_numpy(there.memory)

    def start(self, direction: Direction, runs: RowRuns, stream: CudaStream) -> None:
        assert isinstance(stream, torch.cuda.Stream)
        # The engine's pool may have been made in inference mode, and then changes in it only.
        with torch.inference_mode(), torch.cuda.stream(stream):
            for first_here, first_there, length in zip(*(r.tolist() for r in runs), strict=True):
                here = self._here[first_here : first_here + length]
                there = self._there[first_there : first_there + length]
                target, source = (here, there) if direction == "load" else (there, here)
                target.copy_(source, non_blocking=True)
