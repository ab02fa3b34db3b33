"""How attention layers reach the page pool: the seam between models and attention kernels."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from workers.attention.batch import Batch, BatchTensors, StepUpload
from workers.attention.math import AttentionOptions


class LayerAttention(Protocol):
    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Store `key` and `value` [T,Hk,D] in the pool and return the output [T,H,Dv] for `query` [T,H,D]."""
        ...


class AttentionBackend(LayerAttention, Protocol):
    """Attention over one page pool.

    Each step calls `prepare` on the host, then, once the step's upload is queued, `begin` and then `attend`
    for every layer.

    `begin` and `attend` only enqueue work that reads tensors, so a graph can capture both. `prepare` runs
    outside the graph.
    """

    @property
    def captures_decodes(self) -> bool:
        """Whether `prepare` puts nothing for a decode step, and a graph that captured one replays for any
        sequences and lengths. Rows at position -1 are then left out.
        """
        ...

    def prepare(self, batch: Batch, upload: StepUpload) -> None:
        """Note what the host needs for the step, and put in `upload` what the device needs beyond
        `BatchTensors`.
        """
        ...

    def begin(self, tensors: BatchTensors) -> None:
        """Called once per step, before the first `attend`."""
        ...
