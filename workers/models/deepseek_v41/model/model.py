"""The forward pass of the text model over one step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from workers.attention.row_tiles import map_rows
from workers.models.deepseek_v41.attention.attention import Attention, attend
from workers.models.deepseek_v41.attention.indexer import IndexQuery, TopKSelection, TopKSelector
from workers.models.deepseek_v41.attention.rope import Rotation, compressed_rope, window_rope
from workers.models.deepseek_v41.engram.layer import Engram
from workers.models.deepseek_v41.linear import Linear, RMSNorm, batched_product
from workers.models.deepseek_v41.model.hyper_connection import (
    HyperConnection,
    Mix,
    collapse,
    expand,
)
from workers.models.deepseek_v41.moe.experts import Experts
from workers.models.deepseek_v41.moe.moe import MoE

if TYPE_CHECKING:
    from workers.models.deepseek_v41.attention.rope import Rope
    from workers.models.deepseek_v41.cache.pools import Caches
    from workers.models.deepseek_v41.config.model_config import LayerRole, ModelConfig
    from workers.models.deepseek_v41.steps.entries import CompressedEntries
    from workers.models.deepseek_v41.steps.rows import Rows
    from workers.models.deepseek_v41.steps.step import Step


class ForwardContext:
    """What travels down the stack beside the stream.

    It holds the rows, their rotations, and the entries that index sources select for the layers after them.
    """

    def __init__(self, model: DeepseekV41, step: Step, rows: Rows, caches: Caches) -> None:
        self.rows = rows
        self.caches = caches
        self.slots = step.slots
        self.window_rotation = model.window_rope(rows.positions)
        self.compressed_rotation = model.compressed_rope(rows.positions)
        self.selector = TopKSelector(model.config, caches, rows, step.block_tables)
        self.selection: TopKSelection | None = None
        self.candidates: Tensor | None = None

    def rotation(self, role: LayerRole) -> Rotation:
        return self.compressed_rotation if role.ratio else self.window_rotation


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, role: LayerRole, dtype: torch.dtype) -> None:
        super().__init__()
        self.role = role
        if role.has_engram:
            self.engram = Engram(config, dtype)
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = Attention(config, role, dtype)
        self.hc_attn = HyperConnection(config)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn = MoE(config, Experts(config), dtype)
        self.hc_ffn = HyperConnection(config)

    def attention_input(
        self, stream: Tensor, pre: Tensor, embeddings: Tensor | None, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        def compute(stream: Tensor, pre: Tensor, *engram: Tensor) -> tuple[Tensor, ...]:
            if engram:
                stream = self.engram(stream, engram[0])
            return stream, self.attn_norm(collapse(stream, pre))

        engram = () if embeddings is None else (embeddings,)
        stream, x = rows.map(compute, stream, pre, *engram)
        return stream, x

    def write_entries(self, x: Tensor, rows: Rows, step: Step, rope: Rope, caches: Caches) -> None:
        source, entries = self.role.layer, step.entries[self.role.ratio]
        compressor, indexer = self.attn.compressor, self.attn.indexer
        (parts,) = rows.map(lambda x: (compressor.project(x),), x)
        members = _members(parts, entries, source, step.slots, caches)

        def finish(members: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
            rotation = rope(positions)
            latent = compressor.pool(members)
            keys = indexer.keys(latent, rotation)  # from the latent before it is rotated
            return rotation.apply_(latent), keys

        main, keys = map_rows(finish, (members, entries.positions), entries.tiles)
        caches.write_entries(source, entries, main, keys)

    def sublayers(
        self, stream: Tensor, x: Tensor, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Run attention on `x`, then the mixture of experts. Returns the stream and the next `pre` mix."""
        rows, rotation = context.rows, context.rotation(self.role)
        queries, low_rank, window_kv = self._project(x, rotation, rows)
        if self.role.picks_topk:
            self._select(x, low_rank, rotation, context)
        window_keys = context.caches.exchange_window(
            self.role.layer, context.slots, rows, window_kv
        )
        address = context.selection.address if self.role.ratio and context.selection else None
        heads = attend(
            queries,
            rows,
            window_keys,
            context.caches,
            self.role.kv_source,
            address,
            self.attn.attn_sink,
        )

        def finish(stream: Tensor, heads: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
            mix: Mix = self.hc_attn(stream)
            stream = expand(self.attn.output(heads, Rotation(cos, sin)), stream, mix)
            ffn_mix: Mix = self.hc_ffn(stream)
            y = self.ffn(
                self.ffn_norm(collapse(stream, mix.pre)), one_row_tiles=rows.tiles is not None
            )
            return expand(y, stream, ffn_mix), ffn_mix.pre

        stream, pre = rows.map(finish, stream, heads, rotation.cos, rotation.sin)
        return stream, pre

    def _project(self, x: Tensor, rotation: Rotation, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        def compute(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
            rotation = Rotation(cos, sin)
            queries, low_rank = self.attn.queries(x, rotation)
            return queries, low_rank, self.attn.window_kv(x, rotation)

        queries, low_rank, window_kv = rows.map(compute, x, rotation.cos, rotation.sin)
        return queries, low_rank, window_kv

    def _select(
        self, x: Tensor, low_rank: Tensor, rotation: Rotation, context: ForwardContext
    ) -> None:
        def compute(x: Tensor, low_rank: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
            return self.attn.indexer.queries(x, low_rank, Rotation(cos, sin))

        queries, weights = context.rows.map(compute, x, low_rank, rotation.cos, rotation.sin)
        query = IndexQuery(context.caches.formats.index.rounded(queries), weights)
        filtered_by = context.candidates if self.role.filters_by_candidates else None
        context.selection = context.selector.select(self.role, query, filtered_by)
        if self.role.picks_candidates:
            context.candidates = context.selection.candidates


class DeepseekV41(nn.Module):
    """The text model.

    Parameters carry the released names, with two exceptions: `hc_attn_fn` is `hc_attn.fn` here (and so on),
    and the routed experts are stacked.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.window_rope = window_rope(config, device)
        self.compressed_rope = compressed_rope(config, device)
        self.embed = Linear(config.hidden_size, config.vocab_size, dtype)
        self.layers = nn.ModuleList(Layer(config, role, dtype) for role in config.roles)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = Linear(config.hidden_size, config.vocab_size, dtype)

    def forward(self, step: Step, caches: Caches) -> Tensor | None:
        """Compute a step: write the caches and return logits, float32 [R,vocab_size].

        The decoder layers run on the step's kept rows only, but the first of them makes the entries of all
        rows. Rows of the result are `step.logit_rows`. Returns None if no row is kept.
        """
        rows = step.encoder
        stream = self.embed.weight[step.token_ids][:, None].repeat(1, self.config.hc_mult, 1)
        pre = stream.new_zeros(len(rows), self.config.hc_mult, dtype=torch.float32)
        pre[:, 0] = 1
        context = ForwardContext(self, step, rows, caches)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            role = layer.role
            embeddings = step.embeddings(role.layer, context.rows)
            stream, x = layer.attention_input(stream, pre, embeddings, context.rows)
            if role.writes_kv:
                layer.write_entries(x, rows, step, self.compressed_rope, caches)
            if role.layer == self.config.first_decoder_layer:
                if step.decoder is None:
                    return None
                if step.decoder_rows is not None:
                    stream, x = stream[step.decoder_rows], x[step.decoder_rows]
                context = ForwardContext(self, step, step.decoder, caches)
            stream, pre = layer.sublayers(stream, x, context)
        if not len(step.logit_rows):
            return None
        return self._logits(stream[step.logit_rows], pre[step.logit_rows], step)

    def _logits(self, stream: Tensor, pre: Tensor, step: Step) -> Tensor:
        def compute(stream: Tensor, pre: Tensor) -> tuple[Tensor, ...]:
            hidden = self.norm(collapse(stream, pre))
            return (batched_product(hidden[None], self.head.weight.T[None])[0],)

        return map_rows(compute, (stream, pre), step.logit_tiles)[0]


def _members(
    parts: Tensor, entries: CompressedEntries, source: int, slots: Tensor, caches: Caches
) -> Tensor:
    """Contributions of each entry's tokens [G,ratio,1 or 2,D].

    They come from this step's rows or from the tail that an earlier step left. Writes this step's tail.
    """
    if entries.ratio == 1:
        return parts[entries.members]
    tail = caches.tail(source)
    members = torch.cat((tail[slots].flatten(0, 1), parts))[entries.members]
    tail[entries.tail_slot, entries.tail_place] = parts[entries.tail_rows]
    return members
