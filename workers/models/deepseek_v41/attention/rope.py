"""Rotary embedding: adjacent channel pairs of the last channels turn with the position.

Layers of ratio 0 use a plain base; everything that touches the global KV uses another base with
YaRN (Peng et al. 2023) always on, without its attention factor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from workers.models.deepseek_v41.config.model_config import ModelConfig, RopeScaling


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of the angles of some positions, float32 [N, rotary_dim / 2] each."""

    cos: Tensor
    sin: Tensor

    def apply_(self, x: Tensor, *, inverse: bool = False) -> Tensor:
        """Rotate the last channels of `x` in place and return it.

        `x` is [N, ..., D] of any float type; the first D - rotary_dim channels stay.
        """
        half = self.cos.shape[-1]
        pairs = torch.unflatten(x[..., x.shape[-1] - 2 * half :], -1, (half, 2))
        shape = (self.cos.shape[0], *(1 for _ in x.shape[1:-1]), half)
        cos, sin = self.cos.view(shape), self.sin.view(shape)
        if inverse:
            sin = -sin
        u, v = pairs.float().unbind(-1)
        pairs.copy_(torch.stack((u * cos - v * sin, u * sin + v * cos), dim=-1))
        return x


class Rope:
    """Turns positions into rotations, with one set of frequencies."""

    def __init__(self, frequencies: Tensor) -> None:
        self.frequencies = frequencies
        """float32 [rotary_dim / 2], radians per position."""

    def __call__(self, positions: Tensor) -> Rotation:
        angles = positions.float()[:, None] * self.frequencies
        return Rotation(angles.cos(), angles.sin())


def window_rope(config: ModelConfig, device: torch.device) -> Rope:
    """For layers of ratio 0."""
    return Rope(_frequencies(config.qk_rope_head_dim, config.rope_theta).to(device))


def compressed_rope(config: ModelConfig, device: torch.device) -> Rope:
    """For layers of ratio 1 and 2: their queries, window KV, latents, indexer and output."""
    plain = _frequencies(config.qk_rope_head_dim, config.compress_rope_theta)
    scaled = _yarn(plain, config.qk_rope_head_dim, config.compress_rope_theta, config.rope_scaling)
    return Rope(scaled.to(device))


def _frequencies(dim: int, theta: float) -> Tensor:
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    return 1.0 / theta**exponents


def _yarn(frequencies: Tensor, dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Interpolate slow pairs by `factor`, leave fast ones alone and blend those between."""

    def pair_with(turns: float) -> float:
        context = scaling.original_max_position_embeddings
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_with(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_with(scaling.beta_slow)), dim - 1)
    pairs = torch.arange(dim // 2, dtype=torch.float32, device="cpu")
    interpolated = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies / scaling.factor * interpolated + frequencies * (1 - interpolated)
