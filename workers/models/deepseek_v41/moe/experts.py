"""Weights of a layer's routed experts: stacked, and packed as FP4 where the checkpoint has them so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.models.deepseek_v41.weights.formats import scale_values, unpack_fp4
from workers.models.deepseek_v41.weights.tensor_table import FP4_GROUP

if TYPE_CHECKING:
    from workers.models.deepseek_v41.config.model_config import ModelConfig

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
        self._pairs: dict[torch.dtype, Tensor] = {}
        """What the two codes of a byte stand for: [256,2]."""

    def put(self, name: str, expert: int, data: Tensor) -> None:
        """Copy one expert's part into its stack: `w1` as stored on the device, or its scales as `w1_scale`.

        The first part decides the type of the stack.
        """
        if data.dtype == torch.float8_e8m0fnu:
            data = data.view(torch.uint8)  # few operations know the type itself
        stack = self._stacks.get(name)
        if stack is None:
            stack = data.new_empty(self.count, *data.shape)
            self._stacks[name] = stack
        stack[expert] = data
        self._filled[name] = self._filled.get(name, 0) + 1

    @property
    def complete(self) -> bool:
        return set(EXPERT_MATRICES) <= set(self._stacks) and all(
            count == self.count for count in self._filled.values()
        )

    def matrices(self, name: ExpertMatrix, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Matrices of experts `ids`, int64 [N] -> `dtype` [N,out,in]."""
        weights = self._stacks[name][ids]
        scales = self._stacks.get(f"{name}_scale")
        if scales is None:
            return weights.to(dtype)
        return self._unpack(weights, scales[ids], dtype)

    def _unpack(self, packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Look up two values per byte in a table, which moves far less memory than decoding bit by bit.

        The product with the scale, a power of two, is exact in any type with float32's range.
        """
        exact = torch.float32 if dtype == torch.float16 else dtype
        table = self._pairs.get(exact)
        if table is None:
            codes = torch.arange(256, dtype=torch.uint8, device=packed.device)
            table = self._pairs[exact] = unpack_fp4(codes[:, None]).to(exact)
        values = functional.embedding(packed.int(), table)
        groups = values.view(*scales.shape, FP4_GROUP)
        groups *= scale_values(scales).to(exact)[..., None]
        return groups.flatten(-2).to(dtype)
