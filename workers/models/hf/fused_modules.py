"""Replaces modules of a transformers model by ones that need fewer and larger kernels.

Which modules are replaced follows from their type's shape, and every replacement must give the original's
results on random rows first. What does not, stays as it is.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from workers.kernels.layer_ops import Activation, LayerOps, Norm

_ACTIVATIONS: Final[dict[str, Activation]] = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
}
_TOLERANCE: Final = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest difference, as a part of the largest value."""


def agree(ours: Tensor, theirs: Tensor) -> bool:
    return _difference(ours, theirs) <= _TOLERANCE[theirs.dtype]


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest one, as a part of the largest value."""
    scale = theirs.float().abs().max().clamp(min=1e-6)
    return float((ours.float() - theirs.float()).abs().max() / scale)


class FusedLinear:
    """Weights of several linear layers of one input, in one piece. The layers' own become views of it."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        self.weight = torch.cat([x.weight.data for x in layers])
        at = 0
        for layer in layers:
            layer.weight.data = self.weight[at : at + layer.out_features]
            at += layer.out_features
        biases = [layer.bias for layer in layers]
        self.bias: Tensor | None = None
        if biases[0] is not None:
            self.bias = torch.cat([bias.data for bias in biases])

    @staticmethod
    def fits(layers: list[nn.Module]) -> bool:
        linear = [layer for layer in layers if type(layer) is nn.Linear]
        with_bias = {layer.bias is not None for layer in linear}
        return len(linear) == len(layers) and len(with_bias) == 1


class FusedNorm(nn.Module):
    def __init__(self, ops: LayerOps, norm: Norm) -> None:
        super().__init__()
        self._ops = ops
        self._norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self._ops.norm(x.reshape(-1, x.shape[-1]), self._norm).view(x.shape)


class FusedMlp(nn.Module):
    """A gated feed-forward layer whose first two products are one."""

    def __init__(self, ops: LayerOps, mlp: nn.Module, activation: Activation) -> None:
        super().__init__()
        self._ops = ops
        self._activation = activation
        self.gate_up = FusedLinear([mlp.gate_proj, mlp.up_proj])  # type: ignore[list-item]
        self.down_proj = mlp.down_proj

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        gated = self._ops.gated_linear(
            rows, self.gate_up.weight, self.gate_up.bias, self._activation
        )
        out: Tensor = self.down_proj(gated)  # type: ignore[operator]
        return out.view(x.shape)


def fuse_modules(network: nn.Module, ops: LayerOps) -> int:
    """Replace norms and gated feed-forward layers. Returns how many were replaced."""
    count = 0
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            fused = _fused_norm(child, ops) or _fused_mlp(child, ops)
            if fused is not None:
                setattr(parent, name, fused)
                count += 1
    return count


def find_norm(module: nn.Module, ops: LayerOps) -> Norm | None:
    """What `module` computes, if it is a root-mean-square norm."""
    weight = getattr(module, "weight", None)
    eps: object = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or weight is None or weight.dim() != 1:
        return None
    if not isinstance(eps, float):
        return None
    candidates = [
        Norm(weight, eps, rounds_first=True),
        Norm(weight, eps, rounds_first=False),
        Norm(1 + weight.float(), eps, rounds_first=False),
    ]
    sample = _sample(weight)
    expected = module(sample)
    best = min(candidates, key=lambda norm: _difference(ops.norm(sample, norm), expected))
    return best if agree(ops.norm(sample, best), expected) else None


def _fused_norm(module: nn.Module, ops: LayerOps) -> FusedNorm | None:
    norm = find_norm(module, ops)
    return None if norm is None else FusedNorm(ops, norm)


def find_activation(mlp: nn.Module) -> Activation | None:
    """The activation of a gated feed-forward layer that `FusedMlp` can replace."""
    parts = dict(mlp.named_children())
    if set(parts) != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return None
    if not FusedLinear.fits([parts["gate_proj"], parts["up_proj"]]):
        return None
    return _ACTIVATIONS.get(type(parts["act_fn"]).__name__)


def _fused_mlp(module: nn.Module, ops: LayerOps) -> FusedMlp | None:
    activation = find_activation(module)
    if activation is None:
        return None
    sample = _sample(module.gate_proj.weight[0])  # type: ignore[index,union-attr]
    expected = module(sample)
    fused = FusedMlp(ops, module, activation)
    return fused if agree(fused(sample), expected) else None


def _sample(like: Tensor) -> Tensor:
    """Three rows of the width of `like`, always the same ones."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(3, like.shape[0], generator=generator)
    return rows.to(like.device, like.dtype)
