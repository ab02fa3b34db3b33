"""The indexer: which entries of the global KV each token attends to.

Scores are computed for whole pages at a time; what a token may not see is masked before anything is
chosen. Where a token sees no more entries than it may choose, all are taken without scoring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.attention.row_tiles import TILE_ROWS, map_rows, position_tiles
from workers.models.deepseek_v41.layout.row_layout import entries_per_page
from workers.models.deepseek_v41.linear import Linear, RMSNorm, batched_product
from workers.models.deepseek_v41.steps.rows import Rows

if TYPE_CHECKING:
    from workers.models.deepseek_v41.attention.rope import Rotation
    from workers.models.deepseek_v41.cache.pools import Caches
    from workers.models.deepseek_v41.config.model_config import LayerRole, ModelConfig
    from workers.models.deepseek_v41.steps.rows import Span

_PRODUCT_ELEMENTS: Final = 1 << 26
"""Query-key products that one call may hold."""
_SCORE_ELEMENTS: Final = 1 << 27
"""Scores that one call may hold."""
_TILE_PAGES: Final = 64
"""Pages whose keys are scored together."""
_INVARIANT_TILE_PAGES: Final = 8
"""The same where results are batch-invariant; there it is never less."""


class Indexer(nn.Module):
    """Query side of an index source. A kv source also owns the key projection."""

    def __init__(self, config: ModelConfig, role: LayerRole, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = config.index_n_heads
        self.scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
        self.wq_b = Linear(config.q_lora_rank, config.index_n_heads * config.index_head_dim, dtype)
        self.weights_proj = Linear(config.hidden_size, config.index_n_heads, dtype)
        if role.writes_kv:
            self.wk = Linear(config.head_dim, config.index_head_dim, dtype)
            self.k_norm = RMSNorm(config.index_head_dim, config.rms_norm_eps)

    def queries(self, x: Tensor, qr: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Queries [T,H,Di] and head weights, float32 [T,H]."""
        queries = rotation.apply_(torch.unflatten(self.wq_b(qr), -1, (self.heads, -1)))
        return queries, self.weights_proj(x).float() * self.scale

    def keys(self, latent: Tensor, rotation: Rotation) -> Tensor:
        """Index keys [G,Di] from unrotated latents [G,D]."""
        return rotation.apply_(self.k_norm(self.wk(latent)))


@dataclass
class TopKSelection:
    """What an index source hands down to the layers after it."""

    address: Tensor
    """int64 [T,K]: chosen entries as addresses in the page pool, in order of position; -1: none."""
    candidates: Tensor | None = None
    """bool [T,blocks]: blocks of entries that later index sources may choose from; None: all."""


@dataclass(frozen=True)
class IndexQuery:
    queries: Tensor
    """[T,H,Di], rounded as the keys are."""
    weights: Tensor
    """float32 [T,H]."""


class _Part(NamedTuple):
    """Rows to score together: all of one sequence, or one row from each of several."""

    rows: slice
    first_span: int
    spans: tuple[Span, ...]


class TopKSelector:
    """Selects the top-k entries of every row of a step. All index sources of a group of rows share it."""

    def __init__(
        self, config: ModelConfig, caches: Caches, rows: Rows, block_tables: Tensor
    ) -> None:
        self._config = config
        self._caches = caches
        self._rows = rows
        self._block_tables = block_tables
        self._batch_invariant = rows.tiles is not None

    def select(
        self, role: LayerRole, query: IndexQuery, filtered_by: Tensor | None
    ) -> TopKSelection:
        """Select entries for every row.

        Args:
            role: role of the index source.
            query: covers all rows.
            filtered_by: `TopKSelection.candidates` of the candidate source, for sources that follow it.
        """
        assert role.kv_source is not None
        config, rows, ratio = self._config, self._rows, role.ratio
        visible = (rows.positions + 1) // ratio
        most = max((span.end // ratio for span in rows.spans if span.rows), default=0)
        width = config.index_topk if self._batch_invariant else min(config.index_topk, most)
        number = torch.arange(width, device=visible.device)
        chosen = torch.where(number < visible[:, None], number, -1)
        blocks = 0
        if role.picks_candidates:
            blocks = -(-most // config.candidate_block_size)
        candidates = None
        if blocks > config.candidate_topk_blocks:
            candidates = torch.ones(len(rows), blocks, dtype=torch.bool, device=visible.device)
        for part in self._parts(ratio):
            scores = self._scores(role, query, part)
            entry = torch.arange(scores.shape[1], device=scores.device)
            scores.masked_fill_(entry >= visible[part.rows][:, None], -torch.inf)
            if candidates is not None:
                kept = self._best_blocks(scores, visible[part.rows])[:, :blocks]
                candidates[part.rows, : kept.shape[1]] = kept
            if filtered_by is not None:
                allowed = _spread(
                    filtered_by[part.rows], config.candidate_block_size, scores.shape[1]
                )
                scores.masked_fill_(~allowed, -torch.inf)
            picked = _numbers(largest(scores, config.index_topk), config.index_topk)
            chosen[part.rows] = functional.pad(picked, (0, width), value=-1)[:, :width]
        return TopKSelection(self._addresses(role.kv_source, ratio, chosen), candidates)

    def _parts(self, ratio: int) -> list[_Part]:
        """Rows to score together, at most `_SCORE_ELEMENTS` scores a part.

        Leaves out sequences that see no more entries than they may choose.
        """
        top = self._config.index_topk
        spans = self._rows.spans
        most = max((span.end // ratio for span in spans), default=0)
        limit = max(1, _SCORE_ELEMENTS // max(1, most))
        if not self._batch_invariant and all(span.rows == 1 for span in spans):
            return [
                _Part(slice(i, i + len(some)), i, some)
                for i in range(0, len(spans) if most > top else 0, limit)
                for some in [spans[i : i + limit]]
            ]
        return [
            _Part(slice(row, min(row + limit, span.first_row + span.rows)), i, (span,))
            for i, span in enumerate(spans)
            if span.end // ratio > top
            for row in range(span.first_row, span.first_row + span.rows, limit)
        ]

    def _scores(self, role: LayerRole, query: IndexQuery, part: _Part) -> Tensor:
        """float32 [rows of the part, entries in the pages that the part's sequences reach]."""
        assert role.kv_source is not None
        queries, weights = query.queries[part.rows], query.weights[part.rows]
        per_page = entries_per_page(role.ratio)
        pages = -(-max(span.end // role.ratio for span in part.spans) // per_page)
        count = len(part.spans)
        tables = self._block_tables[part.first_span : part.first_span + count, :pages]
        if self._batch_invariant:
            return self._invariant_scores(role.kv_source, queries, weights, tables, part)
        by_sequence = (count, len(queries) // count)
        limit = max(1, _PRODUCT_ELEMENTS // (queries.shape[1] * _TILE_PAGES * per_page))
        scores = [
            score_tile(
                torch.unflatten(queries, 0, by_sequence),
                torch.unflatten(weights, 0, by_sequence),
                self._caches.index_keys(role.kv_source, tile),
                limit,
            ).flatten(0, 1)
            for tile in torch.split(tables, _TILE_PAGES, dim=1)
        ]
        return torch.cat(scores, dim=1)

    def _invariant_scores(
        self, source: int, queries: Tensor, weights: Tensor, tables: Tensor, part: _Part
    ) -> Tensor:
        (span,) = part.spans
        first = span.start + part.rows.start - span.first_row
        tiles = position_tiles([(first, len(queries))])
        padded = functional.pad(tables, (0, -tables.shape[1] % _INVARIANT_TILE_PAGES))

        def score(q: Tensor, w: Tensor) -> tuple[Tensor, ...]:
            tile_scores = [
                score_tile(q[None], w[None], self._caches.index_keys(source, pages), TILE_ROWS)[0]
                for pages in torch.split(padded, _INVARIANT_TILE_PAGES, dim=1)
            ]
            return (torch.cat(tile_scores, dim=1),)

        return map_rows(score, (queries, weights), tiles)[0]

    def _best_blocks(self, scores: Tensor, visible: Tensor) -> Tensor:
        """bool [R,blocks]: the best blocks of entries. The newest visible block is always kept."""
        size = self._config.candidate_block_size
        padded = functional.pad(scores, (0, -scores.shape[1] % size), value=-torch.inf)
        best = torch.unflatten(padded, 1, (-1, size)).amax(-1)
        newest = (visible - 1).clamp(min=0) // size
        best.scatter_(1, newest[:, None], torch.inf)
        return largest(best, self._config.candidate_topk_blocks)

    def _addresses(self, source: int, ratio: int, chosen: Tensor) -> Tensor:
        if not chosen.shape[1]:
            return chosen
        page = chosen.clamp(min=0) // entries_per_page(ratio)
        pages = self._block_tables[self._rows.sequence[:, None], page]
        address = self._caches.entry_address(source, pages, chosen.clamp(min=0))
        return torch.where(chosen >= 0, address, -1)


def score_tile(queries: Tensor, weights: Tensor, keys: Tensor, limit: int) -> Tensor:
    """Sum over heads of weight * relu(query . key), float32 [S,Q,N].

    Args:
        queries: [S,Q,H,Di].
        weights: float32 [S,Q,H].
        keys: [S,N,Di], shared by the heads.
        limit: the most queries per product.
    """
    sequences, count, heads = weights.shape
    step_q = max(1, min(count, limit))
    step_s = max(1, limit // step_q)
    by_sequence = []
    for s in range(0, sequences, step_s):
        transposed = keys[s : s + step_s].transpose(1, 2)
        parts = []
        for q in range(0, count, step_q):
            block = queries[s : s + step_s, q : q + step_q]
            products = batched_product(block.flatten(1, 2), transposed).relu_()
            grouped = torch.unflatten(products, 1, (-1, heads)).flatten(0, 1)
            weight = weights[s : s + step_s, q : q + step_q].flatten(0, 1)
            parts.append(torch.bmm(weight[:, None], grouped).view(*block.shape[:2], -1))
        by_sequence.append(torch.cat(parts, dim=1))
    return torch.cat(by_sequence)


def largest(scores: Tensor, count: int) -> Tensor:
    """Mask the `count` largest scores of each row. Ties go to the first; -inf is never chosen.

    The mask depends on the row's scores alone, not on how many columns of -inf follow.
    """
    possible = scores > -torch.inf
    if scores.shape[1] <= count:
        return possible
    least = scores.topk(count, dim=1, sorted=True).values[:, -1:]
    above = scores > least
    equal = (scores == least) & possible
    room = count - above.sum(1, keepdim=True)
    return above | (equal & (equal.cumsum(1) <= room))


def _numbers(mask: Tensor, count: int) -> Tensor:
    """int64 [R, at most count]: columns where the mask holds, ascending, then -1."""
    columns = torch.arange(mask.shape[1], device=mask.device)
    numbers = torch.where(mask, columns, mask.shape[1])
    width = min(count, mask.shape[1])
    first = numbers.topk(width, dim=1, largest=False, sorted=True).values
    return torch.where(first < mask.shape[1], first, -1)


def _spread(blocks: Tensor, size: int, width: int) -> Tensor:
    """Expand blocks to entries: bool [R,width]. Entries beyond the known blocks are not allowed."""
    entries = blocks.repeat_interleave(size, dim=1)[:, :width]
    return functional.pad(entries, (0, width - entries.shape[1]))
