"""Hyper-connections: the residual stream is several copies, mixed at every sublayer.

`mix` looks at the stream before a sublayer and yields three small matrices per token: `pre` collapses
the copies into the input of the NEXT sublayer, `post` and `comb` put this sublayer's output back.
All of it is float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from workers.models.deepseek_v41.linear import float32_parameter, inverse_rms

if TYPE_CHECKING:
    from workers.models.deepseek_v41.config.model_config import ModelConfig


class Mix(NamedTuple):
    """What one sublayer needs to know about the stream's n copies."""

    pre: Tensor
    """float32 [T,n]."""
    post: Tensor
    """float32 [T,n]."""
    comb: Tensor
    """float32 [T,n,n], from (second) to (third dimension); close to doubly stochastic."""


class HyperConnection(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.copies = config.hc_mult
        self.iterations = config.hc_sinkhorn_iters
        self.eps = config.hc_eps
        self.norm_eps = config.rms_norm_eps
        outputs = (2 + self.copies) * self.copies
        self.fn = float32_parameter(outputs, self.copies * config.hidden_size)
        self.base = float32_parameter(outputs)
        self.scale = float32_parameter(3)

    def forward(self, stream: Tensor) -> Mix:
        n = self.copies
        flat = stream.flatten(1).float()
        z = (flat @ self.fn.T) * inverse_rms(flat, self.norm_eps)
        pre_z, post_z, comb_z = torch.split(z, [n, n, n * n], dim=-1)
        pre_base, post_base, comb_base = torch.split(self.base, [n, n, n * n])
        pre = torch.sigmoid(pre_z * self.scale[0] + pre_base) + self.eps
        post = 2 * torch.sigmoid(post_z * self.scale[1] + post_base)
        comb = torch.unflatten(comb_z * self.scale[2] + comb_base, -1, (n, n))
        return Mix(pre, post, self._balance(comb))

    def _balance(self, comb: Tensor) -> Tensor:
        comb = comb.softmax(-1) + self.eps
        comb = comb / (comb.sum(-2, keepdim=True) + self.eps)
        for _ in range(self.iterations - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + self.eps)
            comb = comb / (comb.sum(-2, keepdim=True) + self.eps)
        return comb


def collapse(stream: Tensor, pre: Tensor) -> Tensor:
    """Weighted sum of the copies: [T,n,D], [T,n] -> [T,D] in the stream's type."""
    return (pre[:, :, None] * stream.float()).sum(1).to(stream.dtype)


def expand(output: Tensor, stream: Tensor, mix: Mix) -> Tensor:
    kept = torch.bmm(mix.comb.transpose(1, 2), stream.float())
    return (mix.post[:, :, None] * output.float()[:, None] + kept).to(stream.dtype)
