"""What a DeepSeek-V4.1 model consists of: sizes, layer roles, and the rules that tie them together.

Field names are those of the published `text_config`. `config_file` reads them from a checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Final, Literal

from msgspec import Meta

from workers.contract import ModelLoadError

CACHE_GROUP: Final = 32
"""Channels that share a scale in the cached records: a head must be a multiple of it."""

Size = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
"""Positive and finite."""


@dataclass(frozen=True)
class RopeScaling:
    """YaRN, for layers of ratio 1 and 2."""

    factor: Positive
    beta_fast: Positive
    beta_slow: Positive
    original_max_position_embeddings: Size


@dataclass(frozen=True)
class Quantization:
    """Linear weights are stored as FP8 in blocks, routed experts as FP4."""

    weight_block_size: tuple[Size, Size] = (32, 32)
    """Rows and columns that share a scale."""


@dataclass(frozen=True)
class LayerRole:
    layer: int
    ratio: int
    """Tokens per entry of the global KV that this layer reads; 0: it reads none."""
    kv_source: int | None
    """The layer whose global KV and index keys this one reads; None where `ratio` is 0."""
    index_source: int | None
    """The layer whose choice of entries this one uses; None where `ratio` is 0."""
    writes_kv: bool
    """Owns a compressor and an index key projection."""
    picks_topk: bool
    """Owns an indexer."""
    picks_candidates: bool
    filters_by_candidates: bool
    has_engram: bool
    is_decoder: bool
    """Runs on the last tokens of a prompt only."""


@dataclass(frozen=True)
class ModelConfig:
    """The text model.

    Decoding checks the limits of single fields. Every instance checks what ties fields together.

    Raises:
        ModelLoadError: a field contradicts another; the message names it.
    """

    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: Size
    max_position_embeddings: Size
    rms_norm_eps: Positive

    num_attention_heads: Size
    head_dim: Size
    qk_rope_head_dim: Size
    q_lora_rank: Size
    o_groups: Size
    o_lora_rank: Size
    sliding_window: Size
    rope_theta: Positive
    compress_rope_theta: Positive
    rope_scaling: RopeScaling

    compress_ratios: tuple[int, ...]
    """By layer of the model; entries of draft layers are cut off."""
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: Size
    index_head_dim: Size
    index_topk: Size

    n_routed_experts: Size
    num_experts_per_tok: Size
    moe_intermediate_size: Size
    routed_scaling_factor: Positive
    swiglu_limit: Positive

    hc_mult: Size
    hc_sinkhorn_iters: Size
    hc_eps: Positive

    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_vocab_size: Size
    engram_n_heads: Size
    engram_head_dim: Size
    engram_max_ngram_size: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: Size

    gate_temp: Positive = 1.0
    candidate_source_layer_id: int | None = None
    """None: all entries are scored everywhere."""
    candidate_topk_blocks: int = 0
    candidate_block_size: int = 0
    image_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type of the unquantised weights."""
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        for rules in (_dimension_rules, _source_rules, _candidate_rules, _engram_rules):
            for holds, rule in rules(self):
                if not holds:
                    raise ModelLoadError(f"The model configuration is impossible: {rule}.")

    @cached_property
    def first_decoder_layer(self) -> int:
        """The last layer that writes global KV. A prompt's early tokens end at its input."""
        return self.kv_source_layer_ids[-1]

    @cached_property
    def roles(self) -> tuple[LayerRole, ...]:
        return tuple(_role(self, layer) for layer in range(self.num_hidden_layers))

    @property
    def engram_row_count(self) -> int:
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    def check_keep_tokens(self, keep_tokens: int) -> None:
        """Refuse a bounded replay of this many prompt tokens if it does not fill the decoder's window.

        Raises:
            ModelLoadError: the window would read positions that were never computed.
        """
        if keep_tokens < self.sliding_window:
            raise ModelLoadError(
                f"yoco_keep_tokens is {keep_tokens}, but must be at least {self.sliding_window}, the "
                "length of the sliding window."
            )


def _role(config: ModelConfig, layer: int) -> LayerRole:
    ratio = config.compress_ratios[layer]
    is_index_source = layer in config.index_source_layer_ids
    candidate_source = config.candidate_source_layer_id
    return LayerRole(
        layer=layer,
        ratio=ratio,
        kv_source=_newest_source(config.kv_source_layer_ids, layer) if ratio else None,
        index_source=_newest_source(config.index_source_layer_ids, layer) if ratio else None,
        writes_kv=layer in config.kv_source_layer_ids,
        picks_topk=is_index_source,
        picks_candidates=layer == candidate_source,
        filters_by_candidates=(
            is_index_source and candidate_source is not None and layer > candidate_source
        ),
        has_engram=layer in config.engram_layer_ids,
        is_decoder=layer >= config.first_decoder_layer,
    )


def _newest_source(sources: Sequence[int], layer: int) -> int | None:
    return max((source for source in sources if source <= layer), default=None)


Rules = Iterator[tuple[bool, str]]
"""Whether a rule holds, and what to say if it does not. Later ones take earlier ones for granted."""


def _dimension_rules(c: ModelConfig) -> Rules:
    for name in ("head_dim", "index_head_dim"):
        size = getattr(c, name)
        yield size % CACHE_GROUP == 0, f"{name} is {size}, but must be a multiple of {CACHE_GROUP}"
        rope = f"qk_rope_head_dim is {c.qk_rope_head_dim}"
        yield c.qk_rope_head_dim <= size, f"{rope}, but {name} is only {size}"
        yield c.qk_rope_head_dim % 2 == 0, f"{rope}, but channels rotate in pairs"
    heads = c.num_attention_heads
    yield heads % c.o_groups == 0, f"o_groups is {c.o_groups}, which does not divide {heads} heads"
    experts = f"num_experts_per_tok is {c.num_experts_per_tok}"
    yield (
        c.num_experts_per_tok <= c.n_routed_experts,
        f"{experts}, but there are {c.n_routed_experts} experts",
    )


def _layer_id_rules(c: ModelConfig, name: str) -> Rules:
    ids: tuple[int, ...] = getattr(c, name)
    layers, said = range(c.num_hidden_layers), f"{name} is {list(ids)}"
    yield all(layer in layers for layer in ids), f"{said}, but there are {len(layers)} layers"
    yield list(ids) == sorted(set(ids)), f"{said}, but must be in strict ascending order"


def _source_rules(c: ModelConfig) -> Rules:
    ratios, layers = c.compress_ratios, c.num_hidden_layers
    yield len(ratios) == layers, f"compress_ratios has {len(ratios)} entries for {layers} layers"
    yield set(ratios) <= {0, 1, 2}, "compress_ratios holds something other than 0, 1 and 2"
    yield from _layer_id_rules(c, "kv_source_layer_ids")
    yield from _layer_id_rules(c, "index_source_layer_ids")
    sources = c.kv_source_layer_ids
    yield bool(sources), "kv_source_layer_ids is empty"
    strays = sorted(set(sources) - set(c.index_source_layer_ids))
    yield not strays, f"index_source_layer_ids lacks {strays}, which write global KV"
    for source in c.index_source_layer_ids:
        named = f"index_source_layer_ids names layer {source}"
        yield ratios[source] > 0, f"{named}, whose entry in compress_ratios is 0"
    for layer, ratio in enumerate(ratios):
        newest = _newest_source(sources, layer)
        yield (
            ratio == 0 or (newest is not None and ratios[newest] == ratio),
            f"compress_ratios says {ratio} for layer {layer}, but no layer of that ratio writes global "
            "KV for it",
        )
    first = sources[-1]
    yield (
        [layer for layer, ratio in enumerate(ratios) if ratio == 1] == list(range(first, layers)),
        f"compress_ratios must be 1 from the last kv source (layer {first}) on, and nowhere before it",
    )


def _candidate_rules(c: ModelConfig) -> Rules:
    source, blocks, size = (
        c.candidate_source_layer_id,
        c.candidate_topk_blocks,
        c.candidate_block_size,
    )
    if source is None:
        return
    said = f"candidate_source_layer_id is {source}"
    yield source in c.index_source_layer_ids, f"{said}, which is not in index_source_layer_ids"
    yield (
        source >= c.kv_source_layer_ids[-1],
        f"{said}, but later layers read the global KV of another source",
    )
    yield blocks >= 1, f"candidate_topk_blocks is {blocks}, but must be at least 1"
    yield size >= 1, f"candidate_block_size is {size}, but must be at least 1"
    # The newest block may hold one visible entry only; the kept ones must still fill a top-k.
    sure = (blocks - 1) * size + 1
    yield (
        sure >= c.index_topk,
        f"candidate_topk_blocks keeps only {sure} entries for certain, but index_topk is {c.index_topk}",
    )


def _engram_rules(c: ModelConfig) -> Rules:
    yield from _layer_id_rules(c, "engram_layer_ids")
    tables, layers = len(c.engram_num_embeddings), len(c.engram_layer_ids)
    yield (
        tables == layers,
        f"engram_num_embeddings has {tables} entries for {layers} layers in engram_layer_ids",
    )
    largest = c.engram_max_ngram_size
    yield largest >= 2, f"engram_max_ngram_size is {largest}, but must be at least 2"
    pad = c.engram_pad_token_id
    yield (
        0 <= pad < c.vocab_size,
        f"engram_pad_token_id is {pad}, which is not in the vocabulary",
    )
