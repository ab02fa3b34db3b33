"""Mixture of experts: router, routed experts and the shared expert.

The routed experts run without asking the device which of them were chosen: token-expert pairs are
sorted by expert and cut into tiles of one expert each. How many tiles there can be at most is known
from the shapes alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.models.deepseek_v41.linear import Linear, batched_product, float32_parameter

if TYPE_CHECKING:
    from workers.models.deepseek_v41.config.model_config import ModelConfig
    from workers.models.deepseek_v41.moe.experts import ExpertMatrix, Experts

_TILE_WEIGHTS: Final = 1 << 27
"""Elements of unpacked expert matrices of one kind that one product may hold."""


class Gate(nn.Module):
    """The router. Its scores are float32. The bias affects the choice of experts, not their weights."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top = config.num_experts_per_tok
        self.temperature = config.gate_temp
        self.factor = config.routed_scaling_factor
        self.weight = float32_parameter(config.n_routed_experts, config.hidden_size)
        self.bias = float32_parameter(config.n_routed_experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Experts of each token, int64 [T,k], and their weights, float32 [T,k]."""
        logits = functional.linear(x.float(), self.weight) / self.temperature
        scores = functional.softplus(logits).sqrt()
        chosen = (scores + self.bias).topk(self.top, dim=-1).indices
        weights = scores.gather(1, chosen)
        return chosen, weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.factor


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(gate) * up in float32; the gate is clamped from above only."""
    gate = gate.float().clamp(max=limit)
    return functional.silu(gate) * up.float().clamp(-limit, limit)


class SharedExpert(nn.Module):
    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.limit = config.swiglu_limit
        self.w1 = Linear(config.hidden_size, config.moe_intermediate_size, dtype)
        self.w3 = Linear(config.hidden_size, config.moe_intermediate_size, dtype)
        self.w2 = Linear(config.moe_intermediate_size, config.hidden_size, dtype)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(swiglu(self.w1(x), self.w3(x), self.limit))
        return y


class MoE(nn.Module):
    def __init__(self, config: ModelConfig, experts: Experts, dtype: torch.dtype) -> None:
        super().__init__()
        self.limit = config.swiglu_limit
        self.gate = Gate(config)
        self.experts = experts
        self.shared_experts = SharedExpert(config, dtype)

    def forward(self, x: Tensor, *, one_row_tiles: bool) -> Tensor:
        """[T,D] -> [T,D], in the type of `x`, which may be any float type.

        `one_row_tiles` gives each token-expert pair a product of its own, so that its result cannot depend on
        which other tokens chose the same expert.
        """
        chosen, weights = self.gate(x)
        tile = 1 if one_row_tiles else tile_rows(chosen.numel(), self.experts.count)
        routed = routed_experts(self.experts, x, chosen, weights, self.limit, tile)
        shared: Tensor = self.shared_experts(x)
        return (routed + shared.float()).to(x.dtype)


def tile_rows(pairs: int, experts: int) -> int:
    """About as many rows per tile as an expert gets on average.

    Few tiles are then half empty, and an expert's weights are unpacked about twice at most.
    """
    return 1 << max(0, -(-pairs // experts) - 1).bit_length()


def routed_experts(
    experts: Experts, x: Tensor, chosen: Tensor, weights: Tensor, limit: float, tile: int
) -> Tensor:
    """Weighted sum of the chosen experts' outputs, float32 [T,D].

    Args:
        experts: their weights.
        x: [T,D].
        chosen: int64 [T,k].
        weights: float32 [T,k].
        limit: clamp of the activation.
        tile: rows per tile, a power of two.
    """
    top = chosen.shape[1]
    order, tile_expert, place = _tiles(chosen.flatten(), experts.count, tile)
    inputs = x.new_zeros(len(tile_expert) * tile, x.shape[1])
    inputs[place] = x[order // top]
    scales = weights.new_zeros(len(inputs))
    scales[place] = weights.flatten()[order]
    tiled, tiled_scales = inputs.view(-1, tile, x.shape[1]), scales.view(-1, tile)
    group = max(1, _TILE_WEIGHTS // experts.matrix_elements)
    outputs = torch.cat(
        [
            _tile_outputs(
                experts,
                tiled[i : i + group],
                tile_expert[i : i + group],
                tiled_scales[i : i + group],
                limit,
            )
            for i in range(0, len(tile_expert), group)
        ]
    ).flatten(0, 1)
    by_pair = torch.empty(len(order), x.shape[1], dtype=torch.float32, device=x.device)
    by_pair[order] = outputs[place]
    return by_pair.view(-1, top, x.shape[1]).sum(1)


def _tile_outputs(
    experts: Experts, inputs: Tensor, ids: Tensor, scales: Tensor, limit: float
) -> Tensor:
    """Inputs [N,tile,D] of experts `ids` [N] -> float32 [N,tile,D]."""

    def product(x: Tensor, kind: ExpertMatrix) -> Tensor:
        return batched_product(x, experts.matrices(kind, ids, x.dtype).transpose(1, 2))

    hidden = swiglu(product(inputs, "w1"), product(inputs, "w3"), limit) * scales[:, :, None]
    return product(hidden.to(inputs.dtype), "w2")


def _tiles(pair_expert: Tensor, experts: int, tile: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cut pairs into tiles of one expert each.

    Returns the order of the pairs by expert [P], the expert of each tile (unused tiles at the end have some
    expert), and the place in the tiles of each ordered pair [P]; all int64.
    """
    pairs = len(pair_expert)
    if tile == 1:
        ordinal = torch.arange(pairs, device=pair_expert.device)
        return ordinal, pair_expert, ordinal
    order = pair_expert.argsort(stable=True)
    counts = torch.zeros(experts, dtype=torch.int64, device=pair_expert.device)
    counts.scatter_add_(0, pair_expert, torch.ones_like(pair_expert))
    tiles = (counts + tile - 1) // tile
    tile_ends = tiles.cumsum(0)
    most = pairs // tile + min(experts, pairs)
    tile_expert = torch.searchsorted(
        tile_ends, torch.arange(most, device=pair_expert.device), right=True
    ).clamp(max=experts - 1)
    sorted_expert = pair_expert[order]
    first_pair = (counts.cumsum(0) - counts)[sorted_expert]
    first_tile = (tile_ends - tiles)[sorted_expert]
    place = first_tile * tile + torch.arange(pairs, device=pair_expert.device) - first_pair
    return order, tile_expert, place
