"""Attention: one softmax over the sliding window, the chosen global entries and a learned sink."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from workers.models.deepseek_v41.attention.compressor import Compressor
from workers.models.deepseek_v41.attention.indexer import Indexer
from workers.models.deepseek_v41.linear import (
    Linear,
    RMSNorm,
    batched_product,
    float32_parameter,
)

if TYPE_CHECKING:
    from workers.models.deepseek_v41.attention.rope import Rotation
    from workers.models.deepseek_v41.cache.pools import Caches
    from workers.models.deepseek_v41.config.model_config import LayerRole, ModelConfig
    from workers.models.deepseek_v41.steps.rows import Rows

_KEY_ELEMENTS: Final = 1 << 26
"""Elements of gathered keys that one call may hold."""


class Attention(nn.Module):
    """Weights and row-wise parts of one layer's attention. All heads share one vector as both K and V."""

    def __init__(self, config: ModelConfig, role: LayerRole, dtype: torch.dtype) -> None:
        super().__init__()
        heads, width = config.num_attention_heads, config.head_dim
        self.role = role
        self.heads = heads
        self.groups = config.o_groups
        self.wq_a = Linear(config.hidden_size, config.q_lora_rank, dtype)
        self.q_norm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
        self.wq_b = Linear(config.q_lora_rank, heads * width, dtype)
        self.wkv = Linear(config.hidden_size, width, dtype)
        self.kv_norm = RMSNorm(width, config.rms_norm_eps)
        self.attn_sink = float32_parameter(heads)
        self.wo_a = Linear(heads * width // self.groups, self.groups * config.o_lora_rank, dtype)
        self.wo_b = Linear(self.groups * config.o_lora_rank, config.hidden_size, dtype)
        if role.writes_kv:
            self.compressor = Compressor(config, role.ratio, dtype)
        if role.picks_topk:
            self.indexer = Indexer(config, role, dtype)

    def queries(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Queries [T,H,D], and the low-rank vector that they and the indexer's queries are made from."""
        low_rank = self.q_norm(self.wq_a(x))
        queries = torch.unflatten(self.wq_b(low_rank), -1, (self.heads, -1))
        return rotation.apply_(queries), low_rank

    def window_kv(self, x: Tensor, rotation: Rotation) -> Tensor:
        return rotation.apply_(self.kv_norm(self.wkv(x)))

    def output(self, heads: Tensor, rotation: Rotation) -> Tensor:
        """[T,H,D] -> [T,hidden_size]: rotate back, then project in groups of heads."""
        rotated = rotation.apply_(heads, inverse=True)
        grouped = torch.unflatten(rotated, 1, (self.groups, -1)).flatten(2)
        weight = torch.unflatten(self.wo_a.weight, 0, (self.groups, -1))
        low_rank = torch.bmm(grouped.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)
        out: Tensor = self.wo_b(low_rank.flatten(1))
        return out


def attend(
    queries: Tensor,
    rows: Rows,
    window_keys: Tensor,
    caches: Caches,
    source: int | None,
    address: Tensor | None,
    sink: Tensor,
) -> Tensor:
    """Return the attention output [T,H,D] in the queries' type, not yet rotated back.

    Args:
        queries: [T,H,D].
        rows: the rows, with their places in `window_keys`.
        window_keys: what `Caches.exchange_window` returned.
        caches: hold the global entries.
        source: kv source of those entries; None: window only.
        address: int64 [T,K] as in `TopKSelection.address`; None: window only.
        sink: float32 [H], a logit without a value.
    """
    no_entries = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)
    chosen = no_entries if address is None else address

    def block(
        q: Tensor, window_index: Tensor, window_valid: Tensor, entries: Tensor
    ) -> tuple[Tensor, ...]:
        keys, valid = window_keys[window_index], window_valid
        if source is not None and entries.shape[1]:
            keys = torch.cat((keys, caches.main_kv(source, entries.clamp(min=0))), dim=1)
            valid = torch.cat((valid, entries >= 0), dim=1)
        return (softmax_with_sink(q, keys, valid, sink),)

    per_row = (rows.window_index.shape[1] + chosen.shape[1]) * queries.shape[2]
    return rows.map(
        block,
        queries,
        rows.window_index,
        rows.window_valid,
        chosen,
        limit=max(1, _KEY_ELEMENTS // per_row),
    )[0]


def softmax_with_sink(queries: Tensor, keys: Tensor, valid: Tensor, sink: Tensor) -> Tensor:
    """[T,H,D]: every row attends to its own keys, which are also the values.

    Args:
        queries: [T,H,D].
        keys: [T,N,D]; invalid ones are overwritten, so that nothing stale gets into the sums.
        valid: bool [T,N].
        sink: float32 [H].
    """
    keys.masked_fill_(~valid[:, :, None], 0)
    scores = batched_product(queries, keys.transpose(1, 2)) * queries.shape[-1] ** -0.5
    scores.masked_fill_(~valid[:, None], -torch.inf)
    logits = torch.cat((scores, sink.expand(len(queries), -1)[:, :, None]), dim=2)
    weights = logits.softmax(-1)[:, :, :-1].to(keys.dtype)
    return torch.bmm(weights, keys).to(queries.dtype)
