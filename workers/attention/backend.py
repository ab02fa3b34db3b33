"""How attention layers reach the page pool: the seam between models and attention kernels."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from workers.attention.batch import Batch, BatchTensors, StepUpload
from workers.attention.math import AttentionOptions


class LayerAttention(Protocol):
    """What an attention layer calls."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Store `key` and `value` [T,Hk,D] in the pool and return the output [T,H,Dv] of `query` [T,H,D]."""
        ...


class AttentionBackend(LayerAttention, Protocol):
    """Attention over one page pool, step by step: `prepare` on the host, then, with the step's upload under
    way, `begin` and `attend` for every layer.

    `begin` and `attend` only enqueue work that reads tensors, so that both can be captured in a graph;
    `prepare` stays outside of it.
    """

    def prepare(self, batch: Batch, upload: StepUpload) -> None:
        """A step is being made: note what the host must know, and put what the device must know beside
        `BatchTensors`."""
        ...

    def begin(self, tensors: BatchTensors) -> None:
        """The step's tensors are there."""
        ...
