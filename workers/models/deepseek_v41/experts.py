"""Weights of a layer's routed experts: stacked, and packed as FP4 where the checkpoint has them so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import torch
from torch import Tensor, nn

from workers.models.deepseek_v41.formats import dequantize_fp4

if TYPE_CHECKING:
    from workers.models.deepseek_v41.config import ModelConfig

ExpertMatrix = Literal["w1", "w2", "w3"]
"""Gate, down and up projection."""
EXPERT_MATRICES: Final[tuple[ExpertMatrix, ...]] = ("w1", "w2", "w3")


class Experts(nn.Module):
    """E experts. Matrix `w1` is [E,out,in], or bytes [E,out,in/2] with E8M0 scales [E,out,in/32]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.count = config.n_routed_experts
        self.matrix_elements = config.hidden_size * config.moe_intermediate_size
        self._stacks: dict[str, Tensor] = {}
        self._filled: dict[str, int] = {}

    def put(self, name: str, expert: int, data: Tensor) -> None:
        """Copy one expert's part into its stack: `w1` as stored on the device, or its scales under
        `w1_scale`. The first one decides the type of the stack."""
        stack = self._stacks.get(name)
        if stack is None:
            stack = data.new_empty(self.count, *data.shape)
            self._stacks[name] = stack
        stack[expert] = data
        self._filled[name] = self._filled.get(name, 0) + 1

    @property
    def complete(self) -> bool:
        """Whether every expert has all its parts."""
        return set(EXPERT_MATRICES) <= set(self._stacks) and all(
            count == self.count for count in self._filled.values()
        )

    def matrices(self, name: ExpertMatrix, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Matrices of experts `ids`, int64 [N] -> `dtype` [N,out,in]."""
        weights = self._stacks[name][ids]
        scales = self._stacks.get(f"{name}_scale")
        if scales is None:
            return weights.to(dtype)
        return dequantize_fp4(weights, scales[ids], dtype)
