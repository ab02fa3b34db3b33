"""The compressor of a kv source: tokens become entries of the global KV."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from workers.models.deepseek_v41.linear import Linear, RMSNorm

if TYPE_CHECKING:
    from workers.models.deepseek_v41.config.model_config import ModelConfig


class Compressor(nn.Module):
    """Makes latents of `ratio` tokens each.

    With more than one token, a gate weighs them channel by channel, all in float32.
    """

    def __init__(self, config: ModelConfig, ratio: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gated = ratio > 1
        kind = torch.float32 if self.gated else dtype
        self.wkv = Linear(config.hidden_size, config.head_dim, kind)
        if self.gated:
            self.wgate = Linear(config.hidden_size, config.head_dim, kind)
        self.norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def project(self, x: Tensor) -> Tensor:
        """What each row contributes: [T,1,D], or gate score then value, float32 [T,2,D]."""
        value = self.wkv(x)
        return torch.stack((self.wgate(x), value), dim=1) if self.gated else value[:, None]

    def pool(self, members: Tensor) -> Tensor:
        """Unrotated latents [G,D], from their tokens' contributions [G,ratio,1 or 2,D]."""
        if not self.gated:
            latent: Tensor = self.norm(members[:, 0, 0])
            return latent
        score, value = members.unbind(2)
        pooled: Tensor = self.norm((score.softmax(1) * value).sum(1))
        return pooled
