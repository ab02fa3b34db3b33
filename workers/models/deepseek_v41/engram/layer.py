"""Engram: adds looked-up n-gram embeddings to every copy of the stream, through a gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from workers.models.deepseek_v41.linear import Linear, float32_parameter, inverse_rms

if TYPE_CHECKING:
    from workers.models.deepseek_v41.config.model_config import ModelConfig


class Engram(nn.Module):
    """Engram part of one layer. The table itself (`engram.embed`) stays in host memory."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        copies, width = config.hc_mult, config.hidden_size
        self.copies = copies
        self.norm_eps = config.rms_norm_eps
        looked_up = config.engram_row_count * config.engram_head_dim
        self.wkv = Linear(looked_up, (copies + 1) * width, dtype)
        self.q_weight = float32_parameter(copies, width)
        self.k_weight = float32_parameter(copies, width)

    def forward(self, stream: Tensor, embeddings: Tensor) -> Tensor:
        """Return the stream [T,n,D] with the gated value added.

        Args:
            stream: any float type.
            embeddings: [T, rows * head_dim]: the token's table rows, in order.
        """
        looked_up = torch.unflatten(self.wkv(embeddings).float(), -1, (self.copies + 1, -1))
        key, value = looked_up[:, :-1], looked_up[:, -1:]
        query = stream.float()
        match = (query * self.q_weight * self.k_weight * key).sum(-1, keepdim=True)
        match = match * inverse_rms(query, self.norm_eps) * inverse_rms(key, self.norm_eps)
        match = match * query.shape[-1] ** -0.5
        # A match of 0 takes the sign of its sign bit.
        root = torch.copysign(match.abs().clamp(min=1e-6).sqrt(), match)
        gated: Tensor = query + torch.sigmoid(root) * value
        return gated.to(stream.dtype)
