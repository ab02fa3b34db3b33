"""The dense building blocks: matrices under their released names, RMS norm, float32 products."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Linear(nn.Module):
    """`y = x @ weight.T`, without bias. The input is cast to the weight's type."""

    weight: nn.Parameter

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, dtype=dtype, device="meta"), requires_grad=False
        )

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x.to(self.weight.dtype), self.weight)


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, computed in float32."""

    weight: nn.Parameter

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = float32_parameter(size)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * inverse_rms(wide, self.eps) * self.weight).to(x.dtype)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean of squares + eps) over the last dimension, which is kept. `x` is float32."""
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def float32_parameter(*shape: int) -> nn.Parameter:
    """The parameter has no storage until it is loaded, and is float32 whatever the compute type."""
    return nn.Parameter(
        torch.empty(*shape, dtype=torch.float32, device="meta"), requires_grad=False
    )


def batched_product(a: Tensor, b: Tensor) -> Tensor:
    """[B,M,K] @ [B,K,N] -> float32 [B,M,N]. Half-precision inputs are accumulated in float32."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())
