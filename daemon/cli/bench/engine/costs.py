"""Bytes that a step has to move and operations that it has to do, from the model's dimensions.

What no implementation can avoid: each weight is read once a step, and the KV of each token of each sequence
is read once, or written once by the step that computes it. Activations are left out: they are few.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

Bound = Literal["memory", "compute"]


@dataclass(frozen=True)
class LayerCosts:
    """Of one layer's attention."""

    kv_bytes: int
    """Keys and values of one token."""
    pair_flops: int
    """Operations for one query token and one key token: scores and weighted sum, all heads."""
    window: int | None = None
    """How many tokens a token sees, itself included; None: all."""

    def pairs(self, start: int, tokens: int) -> int:
        """How many keys the tokens at positions start .. start+tokens-1 see, in sum."""
        end = start + tokens
        if self.window is None:
            return _sum_up_to(end) - _sum_up_to(start)
        full = min(max(self.window, start), end)  # from this position on each sees a whole window
        return _sum_up_to(full) - _sum_up_to(start) + (end - full) * self.window

    def keys(self, start: int, tokens: int) -> int:
        """How many different keys they see."""
        end = start + tokens
        return end if self.window is None else min(end, tokens + self.window - 1)


@dataclass(frozen=True)
class StepCosts:
    """Of one step."""

    bytes: float
    flops: float


@dataclass(frozen=True)
class Peaks:
    """What the device reaches with one large copy and one large product."""

    bytes_per_second: float
    flops_per_second: float

    def seconds(self, costs: StepCosts) -> float:
        """The roofline: no step is faster than its bytes or its operations allow."""
        return max(costs.bytes / self.bytes_per_second, costs.flops / self.flops_per_second)

    def bound(self, costs: StepCosts) -> Bound:
        memory = costs.bytes / self.bytes_per_second
        return "memory" if memory >= costs.flops / self.flops_per_second else "compute"


class ModelCosts(msgspec.Struct, frozen=True):
    """What the costs of every step follow from."""

    weight_bytes: int
    """All weights but the embedding table, of which a step reads a few rows."""
    linear_parameters: int
    """Of the layers, which compute every token."""
    head_parameters: int
    """Of the output layer, which computes rows that a token is sampled for."""
    layers: tuple[LayerCosts, ...]

    @property
    def kv_bytes(self) -> int:
        """Of one token."""
        return sum(layer.kv_bytes for layer in self.layers)

    @property
    def token_flops(self) -> int:
        """Linear layers alone."""
        return 2 * self.linear_parameters

    def decode(self, batch: int, context: int) -> StepCosts:
        """One token for each of `batch` sequences, which then have `context` tokens."""
        attention = self._attention(context - 1, 1)
        return StepCosts(
            self.weight_bytes + batch * attention.bytes,
            batch * (2 * (self.linear_parameters + self.head_parameters) + attention.flops),
        )

    def prefill(self, tokens: int, history: int = 0) -> StepCosts:
        """A chunk of a prompt after `history` tokens that have KV. It ends the prompt."""
        attention = self._attention(history, tokens)
        return StepCosts(
            self.weight_bytes + attention.bytes,
            tokens * self.token_flops + 2 * self.head_parameters + attention.flops,
        )

    def _attention(self, start: int, tokens: int) -> StepCosts:
        """Of one sequence whose tokens start .. start+tokens-1 are computed."""
        seen = sum(layer.keys(start, tokens) * layer.kv_bytes for layer in self.layers)
        pairs = sum(layer.pairs(start, tokens) * layer.pair_flops for layer in self.layers)
        return StepCosts(seen, pairs)


def _sum_up_to(count: int) -> int:
    return count * (count + 1) // 2
