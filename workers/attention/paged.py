"""Attention of transformers models over the page pool.

`register()` makes `paged_attention` known to transformers under `ATTENTION_NAME`. A model call then
carries an `AttentionStep` as the keyword `paged_step`; every attention layer hands it queries, keys
and values of the flattened batch, and the step writes the pool, reads it and returns the output.

No mask function is registered on purpose: transformers then builds no mask at all, which saves work
and a host synchronisation. Models whose masks say more than "causal, with this window" are refused
when they are loaded (`workers/models/hf/probe.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from hicache.layout import CacheLayout
from workers.attention.math import AttentionOptions, attend
from workers.contract import PAGE_TOKENS, ModelLoadError

ATTENTION_NAME: Final = "deepinfer_paged"

_GATHER_TOKENS: Final = 1 << 18
"""Padded key positions that one batched decode gather may hold; larger batches go in groups."""

# Keywords that cannot change the result here: they ask for extra outputs, repeat what the step
# knows, or concern caches and training.
_HARMLESS_KEYWORDS: Final = frozenset(
    {
        "position_ids",
        "use_cache",
        "cache_position",
        "past_key_values",
        "cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "logits_to_keep",
        "num_items_in_batch",
        "position_embeddings",
        "tie_last_hidden_states",
        "deterministic",
    }
)


class AttentionStep(Protocol):
    """What a model call carries to its attention layers."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Store `key`, `value` [T,Hk,D] and return the attention output [T,H,Dv]
        of `query` [T,H,D]."""
        ...


def register() -> None:
    """Make `paged_attention` available to transformers. Idempotent."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged_step: AttentionStep | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """transformers' attention function: `query` [1,H,T,D], `key` and `value` [1,Hk,T,D] in,
    ([1,T,H,Dv], None) out.

    Raises:
        ModelLoadError: the layer asks for something that would change the result and is not done
            here. Seen when the model is probed at load time.
    """
    unknown = sorted(k for k, v in others.items() if v is not None and k not in _HARMLESS_KEYWORDS)
    if unknown:
        raise ModelLoadError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention, which this "
            "engine does not implement, so the model would give wrong text; it cannot be served."
        )
    if paged_step is None:
        raise ModelLoadError(
            f"{type(module).__name__} does not hand keyword arguments on to its attention "
            "function, which this engine needs; it cannot be served."
        )
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if attention_mask is not None or not causal or dropout:
        raise ModelLoadError(
            f"{type(module).__name__} uses an attention mask of its own, bidirectional attention "
            "or dropout; only causal language models can be served."
        )
    options = AttentionOptions(
        scaling=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=sliding_window or None,
        softcap=softcap,
        sinks=s_aux,
    )
    output = paged_step.attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        options,
    )
    return output.unsqueeze(0), None


class PagePool:
    """The device's KV memory: one uint8 tensor [num_pages, page_bytes] and typed views into it."""

    def __init__(self, layout: CacheLayout, num_pages: int, device: torch.device) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.rows = _zeroed_rows(num_pages, layout.page_bytes, device)
        views = [self._view(i) for i in range(len(layout.page_tensors))]
        self.keys = views[0::2]
        """By layer: [num_pages, page_tokens, Hk, D]."""
        self.values = views[1::2]
        """By layer: [num_pages, page_tokens, Hk, Dv]."""

    def store(
        self, layer: int, pages: Tensor, offsets: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write KV [T,Hk,D] at (pages, offsets) and return it as the pool gives it back, rounded to
        the pool's dtype, so that a token sees the same KV in this step and in later ones."""
        keys, values = self.keys[layer], self.values[layer]
        stored_key, stored_value = key.to(keys.dtype), value.to(values.dtype)
        keys[pages, offsets] = stored_key
        values[pages, offsets] = stored_value
        return stored_key.to(key.dtype), stored_value.to(value.dtype)

    def _view(self, index: int) -> Tensor:
        part = self.layout.page_tensors[index]
        dtype: torch.dtype = getattr(torch, part.dtype)
        tokens, heads, dim = part.shape
        row = self.layout.page_bytes // dtype.itemsize
        return self.rows.view(dtype).as_strided(
            (self.num_pages, tokens, heads, dim),
            (row, heads * dim, dim, 1),
            part.offset // dtype.itemsize,
        )


def _zeroed_rows(num_pages: int, page_bytes: int, device: torch.device) -> Tensor:
    """Zeros, so that what a mask hides is finite. On a CPU they come from calloc: the machine's memory
    is taken page by page as sequences first use it, not at start."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros((num_pages, page_bytes), np.uint8))
    return torch.zeros(num_pages, page_bytes, dtype=torch.uint8, device=device)


@dataclass
class Segment:
    """Consecutive tokens of one sequence inside a flattened batch; lengths known to the host."""

    first_row: int
    tokens: int
    start: int
    """Position of its first token, = tokens already in the pool."""
    block_table: Tensor
    """int32 [max_pages]."""
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def first_key(self, window: int | None) -> int:
        """Position of the first key that the segment needs, rounded down to a page border."""
        oldest = 0 if window is None else max(0, self.start - window + 1)
        return oldest - oldest % PAGE_TOKENS

    def allowed(self, window: int | None, device: torch.device) -> Tensor:
        """bool [1, tokens, keys from `first_key` on]; made once per step and window."""
        if window not in self.masks:
            end = self.start + self.tokens
            queries = torch.arange(self.start, end, device=device)[:, None]
            keys = torch.arange(self.first_key(window), end, device=device)[None]
            mask = keys <= queries
            if window is not None:
                mask &= keys > queries - window
            self.masks[window] = mask[None]
        return self.masks[window]


@dataclass
class SegmentedStep:
    """A step whose lengths the host knows: prompt chunks, and decodes on a CPU."""

    pool: PagePool
    segments: list[Segment]
    write_pages: Tensor
    """int [T]: the page of each token's KV."""
    write_offsets: Tensor
    """int [T]: its place in the page."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        key, value = self.pool.store(layer, self.write_pages, self.write_offsets, key, value)
        outputs = [
            self._attend_segment(layer, segment, query, key, value, options)
            for segment in self.segments
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_segment(
        self,
        layer: int,
        segment: Segment,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        rows = slice(segment.first_row, segment.first_row + segment.tokens)
        window = options.window
        inside = window is None or segment.tokens <= window
        if segment.start == 0 and inside:
            own = (query[None, rows], key[None, rows], value[None, rows])
            return attend(*own, None, causal=True, options=options)[0]
        keys, values = self._gather(layer, segment, window, query.dtype)
        if segment.tokens == 1:
            if window is not None:
                keys, values = keys[-window:], values[-window:]
            allowed = None
        else:
            allowed = segment.allowed(window, query.device)
        return attend(
            query[None, rows], keys[None], values[None], allowed, causal=False, options=options
        )[0]

    def _gather(
        self, layer: int, segment: Segment, window: int | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Keys and values as `dtype` from `first_key` to the segment's end: [L,Hk,D], [L,Hk,Dv]."""
        first = segment.first_key(window)
        end = segment.start + segment.tokens
        pages = segment.block_table[first // PAGE_TOKENS : -(-end // PAGE_TOKENS)]
        keys = self.pool.keys[layer].index_select(0, pages).flatten(0, 1)
        values = self.pool.values[layer].index_select(0, pages).flatten(0, 1)
        count = end - first
        return keys[:count].to(dtype), values[:count].to(dtype)


@dataclass
class DecodeStep:
    """One token of each of B sequences, whose lengths only the device needs to know."""

    pool: PagePool
    block_tables: Tensor
    """int32 [B, max_pages]."""
    positions: Tensor
    """int64 [B]: position of each input token."""
    width: int
    """Pages that the longest of the sequences uses (host's bound)."""
    write_pages: Tensor
    write_offsets: Tensor
    gather_tokens: int = _GATHER_TOKENS
    gathers: dict[int | None, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        self.pool.store(layer, self.write_pages, self.write_offsets, key, value)
        pages, allowed = self._gather_plan(options.window)
        group = max(1, self.gather_tokens // allowed.shape[1])
        outputs = []
        for at in range(0, query.shape[0], group):
            rows = slice(at, at + group)
            keys = self.pool.keys[layer][pages[rows]].flatten(1, 2).to(query.dtype)
            values = self.pool.values[layer][pages[rows]].flatten(1, 2).to(query.dtype)
            outputs.append(
                attend(
                    query[rows, None],
                    keys,
                    values,
                    allowed[rows, None],
                    causal=False,
                    options=options,
                )[:, 0]
            )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _gather_plan(self, window: int | None) -> tuple[Tensor, Tensor]:
        """Pages to read, int32 [B,C], and which of their tokens count, bool [B, C*page_tokens]."""
        if window not in self.gathers:
            columns = self._columns(window)
            offsets = torch.arange(PAGE_TOKENS, device=columns.device)
            keys = (columns[:, :, None] * PAGE_TOKENS + offsets).flatten(1)
            queries = self.positions[:, None]
            allowed = (keys >= 0) & (keys <= queries)
            if window is not None:
                allowed &= keys > queries - window
            pages = self.block_tables.gather(1, columns.clamp(min=0))
            self.gathers[window] = (pages, allowed)
        return self.gathers[window]

    def _columns(self, window: int | None) -> Tensor:
        """Block-table columns to read, int64 [B,C]; negative ones stand for nothing."""
        device = self.positions.device
        count = self.width
        if window is not None:
            count = min(count, (window + PAGE_TOKENS - 2) // PAGE_TOKENS + 1)
        if count == self.width:
            return torch.arange(count, device=device).expand(len(self.positions), count)
        last = self.positions[:, None] // PAGE_TOKENS
        return last - torch.arange(count - 1, -1, -1, device=device)
