"""Attention over gathered keys and values, with the variants that Hugging Face models ask for.

Shapes: B sequences, T query tokens each, L keys each, H query heads, Hk key/value heads (H is a
multiple of Hk; query head h reads key head h // (H / Hk)), D key and Dv value dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

_MAX_SCORES: Final = 1 << 26
"""The most score elements that the explicit path holds at a time; it splits query rows into blocks."""
_MAX_MASK: Final = 1 << 28
"""Mask elements that one call of PyTorch's attention gets. On a GPU it makes a few copies of the mask in
the queries' type, and counts its elements in 32 bits: beyond 2**32 it would read wrong ones."""


@dataclass(frozen=True)
class AttentionOptions:
    scaling: float
    window: int | None = None
    """A query at p sees the keys p - window < k <= p; None: all keys up to p."""
    softcap: float | None = None
    sinks: Tensor | None = None
    """[H]: one extra logit per head that takes probability and yields no value."""

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks is None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    causal: bool,
    options: AttentionOptions,
) -> Tensor:
    """Attention of `query` [B,T,H,D] over `key` [B,L,Hk,D] and `value` [B,L,Hk,Dv].

    Args:
        allowed: bool [B,T,L], which keys a query may see; None: all, or as `causal` says.
        causal: query t sees keys 0..t (then T == L and `allowed` is None).
        options: `window` is ignored; the caller applies it in `allowed`.

    Returns:
        [B,T,H,Dv].
    """
    if not options.plain:
        return _attend_explicitly(query, key, value, allowed, causal, options)
    heads, kv_heads = query.shape[2], key.shape[2]
    if query.shape[1] == 1:
        return _attend_one_token(query, key, value, allowed, options.scaling)
    if allowed is None and causal and query.is_cuda and query.dtype == torch.float32:
        return attend_causally(query, key, value, options.scaling)
    if allowed is None:
        out = functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            is_causal=causal,
            scale=options.scaling,
            enable_gqa=heads != kv_heads,
        )
        return out.transpose(1, 2)
    sequences = [
        _attend_masked(query[b], key[b], value[b], allowed[b], options.scaling)
        for b in range(query.shape[0])
    ]
    return sequences[0] if len(sequences) == 1 else torch.cat(sequences)


def _attend_one_token(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, scaling: float
) -> Tensor:
    """For T == 1. The query heads of one key head become query rows, so no key is repeated."""
    batch, _, heads, dim = query.shape
    kv_heads = key.shape[2]
    out = functional.scaled_dot_product_attention(
        query.reshape(batch, kv_heads, heads // kv_heads, dim),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=None if allowed is None else allowed[:, None],
        scale=scaling,
    )
    return out.reshape(batch, 1, heads, value.shape[3])


def attend_causally(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """For T == L. Every query head is broadcast against its key head.

    Used for float32 on a GPU: there PyTorch's kernels for fewer key heads than query heads take 16-bit types
    only, and the fallback holds all T * T scores.
    """
    return _attend_broadcast(query, key, value, None, True, scaling)


def _attend_broadcast(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, causal: bool, scaling: float
) -> Tensor:
    """Fold key heads into the batch dimension and broadcast keys and values over their query heads.

    `allowed` is None or one mask [T,L] for all. Returns [B,T,H,Dv].
    """
    batch, tokens, heads, _ = query.shape
    kv_heads = key.shape[2]
    group = heads // kv_heads
    out = functional.scaled_dot_product_attention(
        torch.unflatten(query, 2, (kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(0, 1),
        _broadcast_heads(key, group),
        _broadcast_heads(value, group),
        attn_mask=allowed,
        is_causal=causal,
        scale=scaling,
    )
    out = torch.unflatten(out, 0, (batch, kv_heads)).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, tokens, heads, value.shape[3])


def _broadcast_heads(x: Tensor, group: int) -> Tensor:
    """[B,L,Hk,D] -> [B*Hk,group,L,D], without a copy for one sequence."""
    return x.transpose(1, 2).flatten(0, 1)[:, None].expand(-1, group, -1, -1)


def _attend_masked(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, scaling: float
) -> Tensor:
    """Handle one sequence with a mask [T,L], in blocks of query rows. Returns [1,T,H,Dv]."""
    rows = max(1, _MAX_MASK // key.shape[0])
    blocks = [
        _masked_block(query[at : at + rows], key, value, allowed[at : at + rows], scaling)
        for at in range(0, query.shape[0], rows)
    ]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)


def _masked_block(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, scaling: float
) -> Tensor:
    # PyTorch's kernel reads a mask wrongly for one query row and broadcast heads.
    if query.shape[0] == 1:
        return _attend_one_token(query[None], key[None], value[None], allowed[None], scaling)
    return _attend_broadcast(query[None], key[None], value[None], allowed, False, scaling)


def _attend_explicitly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    causal: bool,
    options: AttentionOptions,
) -> Tensor:
    """Compute scores in float32, for soft caps and sinks, in blocks of query rows to bound the memory."""
    batch, tokens, heads, _ = query.shape
    length = key.shape[1]
    if causal and tokens > 1:
        positions = torch.arange(tokens, device=query.device)
        allowed = (positions[None] <= positions[:, None])[None]
    block = max(1, _MAX_SCORES // (batch * heads * length))
    blocks = [
        _explicit_block(
            query[:, at : at + block],
            key,
            value,
            None if allowed is None else allowed[:, at : at + block],
            options,
        )
        for at in range(0, tokens, block)
    ]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)


def _explicit_block(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, options: AttentionOptions
) -> Tensor:
    batch, tokens, heads, dim = query.shape
    kv_heads = key.shape[2]
    group = heads // kv_heads
    rows = query.reshape(batch, tokens, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    scores = rows.reshape(batch, kv_heads, group * tokens, dim) @ key.permute(0, 2, 3, 1)
    scores = scores.float().view(batch, kv_heads, group, tokens, -1) * options.scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if allowed is not None:
        scores = scores.masked_fill(~allowed[:, None, None], float("-inf"))
    normaliser = scores.logsumexp(-1, keepdim=True)
    if options.sinks is not None:
        sinks = options.sinks.float().view(1, kv_heads, group, 1, 1)
        normaliser = torch.logaddexp(normaliser, sinks)
    weights = (scores - normaliser).exp().to(value.dtype)
    out = weights.view(batch, kv_heads, group * tokens, -1) @ value.transpose(1, 2)
    out = out.view(batch, kv_heads, group, tokens, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, tokens, heads, value.shape[3])
