"""What a decoder layer computes between its matrix products and its attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class Norm:
    """A root-mean-square norm."""

    weight: Tensor
    """[width]."""
    eps: float
    rounds_first: bool = True
    """Whether the normalised values are rounded to the input's type before they meet the weight."""


@dataclass(frozen=True)
class HeadShape:
    """How a row of fused queries, keys and values is divided: heads, then kv_heads twice, each of `dim`."""

    heads: int
    kv_heads: int
    dim: int

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.dim

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T,width] -> [T,heads,dim], [T,kv_heads,dim], [T,kv_heads,dim], without a copy."""
        parts = qkv.view(qkv.shape[0], -1, self.dim)
        keys = self.heads + self.kv_heads
        return parts[:, : self.heads], parts[:, self.heads : keys], parts[:, keys:]


class LayerOps(Protocol):
    """Each operation treats every row on its own and rounds to the inputs' type where transformers does."""

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Normalise `x` [T,width]."""
        ...

    def add_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """Return the normalised sum of both, and the sum. All [T,width]."""
        ...

    def rotate(
        self,
        qkv: Tensor,
        shape: HeadShape,
        rotary: tuple[Tensor, Tensor],
        norms: tuple[Norm, Norm] | None,
    ) -> Tensor:
        """Rotate the queries and keys in `qkv` [T,shape.width] and return them with the values.

        Args:
            rotary: cosines and sines, [T,dim] each, of the type of `qkv`.
            norms: of each query head and each key head, applied first.

        `qkv` may be changed in place.
        """
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[T,inner] times `weight` [width,inner], plus `bias`: [T,width]."""
        ...

    def gated_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation
    ) -> Tensor:
        """`linear` with `weight` [2*width,inner]; then the activation of the first half times the second."""
        ...


class TorchLayerOps:
    """The reference, for every device and type."""

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
        if norm.rounds_first:
            scaled = scaled.to(x.dtype)
        return (norm.weight * scaled).to(x.dtype)

    def add_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.norm(total, norm), total

    def rotate(
        self,
        qkv: Tensor,
        shape: HeadShape,
        rotary: tuple[Tensor, Tensor],
        norms: tuple[Norm, Norm] | None,
    ) -> Tensor:
        query, key, value = shape.split(qkv)
        if norms is not None:
            query, key = self.norm(query, norms[0]), self.norm(key, norms[1])
        cos, sin = rotary[0][:, None], rotary[1][:, None]
        rotated = [x * cos + _rotate_half(x) * sin for x in (query, key)]
        return torch.cat([*rotated, value], dim=1).flatten(1)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight, bias)

    def gated_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation
    ) -> Tensor:
        gate, up = functional.linear(x, weight, bias).chunk(2, dim=-1)
        if activation == "silu":
            return functional.silu(gate) * up
        return functional.gelu(gate, approximate="tanh") * up


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
