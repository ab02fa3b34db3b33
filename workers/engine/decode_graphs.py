"""Decode steps as CUDA graphs, one for each padded batch size.

A step of a small batch is mostly launches. A graph launches all of them at once, from static memory: the
step's upload, the slot tables, the model's caches.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

_log = logging.getLogger(__name__)

_LARGEST: Final = 512
"""Larger batches run without a graph: their launches take less time than their work."""


@dataclass(frozen=True)
class DecodeOutput:
    """What a decode step computes on the device, for all of its rows."""

    logits: Tensor
    """[rows,vocab_size]."""
    tokens: Tensor
    """int64 [rows]: the likeliest ones."""


def padded_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes that get a graph, ascending.

    Padding costs at most a half of a small batch and an eighth of a large one. There is none of one row:
    cuBLAS's products of one row are slower than those of two.
    """
    sizes = [2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256]
    sizes += range(320, _LARGEST + 1, 64)
    most = min(max_num_seqs, _LARGEST)
    return sorted({*(s for s in sizes if s < most), most})


class DecodeGraphs:
    """Owns the graphs and the memory that they share."""

    def __init__(self) -> None:
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, DecodeOutput]] = {}
        self._sizes: list[int] = []

    def capture(
        self,
        sizes: Sequence[int],
        compute: Callable[[int], Callable[[], DecodeOutput]],
        report: Callable[[str], None],
    ) -> None:
        """Capture a graph for each size.

        Args:
            sizes: the largest is captured first, so that the others fit into its memory.
            compute: readies a step of a size outside the graph, and returns what the graph consists of.
            report: receives a line of text from time to time.

        A model that cannot be captured stays without graphs, which a warning says.
        """
        started = time.monotonic()
        pool = torch.cuda.graph_pool_handle()
        ordered = sorted(sizes, reverse=True)
        for done, size in enumerate(ordered):
            report(f"capturing decode steps: {done} of {len(ordered)}")
            try:
                self._graphs[size] = _capture(compute(size), pool)
            except RuntimeError as error:
                _log.warning(
                    "Decode steps run without CUDA graphs, which costs speed: %s",
                    str(error).partition("\n")[0],
                )
                self._graphs.clear()
                return
        self._sizes = sorted(self._graphs)
        _log.info("Captured %d decode graphs in %.1f s.", len(ordered), time.monotonic() - started)

    def padded(self, rows: int) -> int:
        """The least captured size for a step of `rows`; 0: there is none."""
        at = bisect_left(self._sizes, rows)
        return self._sizes[at] if at < len(self._sizes) else 0

    def replay(self, size: int) -> DecodeOutput:
        """Enqueue a step of a captured size. The output is valid until the next step."""
        graph, output = self._graphs[size]
        graph.replay()
        return output


def _capture(
    step: Callable[[], DecodeOutput], pool: _POOL_HANDLE
) -> tuple[torch.cuda.CUDAGraph, DecodeOutput]:
    step()  # compiles kernels and lets libraries allocate their workspaces
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        output = step()
    return graph, output
