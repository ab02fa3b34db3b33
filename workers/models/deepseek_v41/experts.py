"""Weights of a layer's routed experts: stacked, and packed as FP4 where the checkpoint has them so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import torch
from torch import Tensor, nn

from workers.models.deepseek_v41.formats import FP4_GROUP, dequantize_fp4

if TYPE_CHECKING:
    from workers.models.deepseek_v41.config import ModelConfig

ExpertMatrix = Literal["w1", "w2", "w3"]
"""Gate, down and up projection."""
EXPERT_MATRICES: Final[tuple[ExpertMatrix, ...]] = ("w1", "w2", "w3")


class Experts(nn.Module):
    """E experts; matrix `w1` is the parameter `w1` [E,out,in], or bytes [E,out,in/2] with E8M0 scales
    `w1_scale` [E,out,in/32]."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.count = config.n_routed_experts
        self.packed = config.quantization is not None
        width, hidden = config.hidden_size, config.moe_intermediate_size
        self.matrix_elements = width * hidden
        for name in EXPERT_MATRICES:
            out, inputs = (width, hidden) if name == "w2" else (hidden, width)
            if self.packed:
                self._add(name, (out, inputs // 2), torch.uint8)
                self._add(f"{name}_scale", (out, inputs // FP4_GROUP), torch.uint8)
            else:
                self._add(name, (out, inputs), dtype)

    def _add(self, name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
        empty = torch.empty(self.count, *shape, dtype=dtype, device="meta")
        self.register_parameter(name, nn.Parameter(empty, requires_grad=False))

    def matrices(self, name: ExpertMatrix, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Matrices of experts `ids`, int64 [N] -> `dtype` [N,out,in]."""
        weights = self.get_parameter(name)[ids]
        if not self.packed:
            return weights.to(dtype)
        return dequantize_fp4(weights, self.get_parameter(f"{name}_scale")[ids], dtype)
