"""What a DeepSeek-V4.1 model consists of: sizes, layer roles, and the rules that tie them together.

Field names are those of the published `text_config`. `config_file` reads them from a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

from workers.contract import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Sequence

CACHE_GROUP: Final = 32
"""Channels that share a scale in the cached records: a head must be a multiple of it."""


@dataclass(frozen=True)
class RopeScaling:
    """YaRN, for layers of ratio 1 and 2."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Quantization:
    """How the linear weights are stored: FP8 in blocks, routed experts in FP4."""

    weight_block_size: tuple[int, int] = (32, 32)
    """Rows and columns that share a scale."""


@dataclass(frozen=True)
class LayerRole:
    """What one layer writes, reads and chooses."""

    layer: int
    ratio: int
    """Tokens to an entry of the global KV that this layer reads; 0: it reads none."""
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
    """The text model. Checked as a whole: an instance describes a model that can be built.

    Raises:
        ModelLoadError: a field is out of range or contradicts another; the message names it.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    rms_norm_eps: float

    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling

    compress_ratios: tuple[int, ...]
    """By layer of the model; entries of draft layers are cut off."""
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int

    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float

    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float

    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_max_ngram_size: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int

    gate_temp: float = 1.0
    candidate_source_layer_id: int | None = None
    """None: all entries are scored everywhere."""
    candidate_topk_blocks: int = 0
    candidate_block_size: int = 0
    image_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    """Of the unquantised weights: `bfloat16`, `float16` or `float32`."""
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        _check_ranges(self)
        _check_attention(self)
        _check_sources(self)
        _check_candidates(self)
        _check_engram(self)

    @cached_property
    def first_decoder_layer(self) -> int:
        """The last layer that writes global KV; a prompt's early tokens end at its input side."""
        return self.kv_source_layer_ids[-1]

    @cached_property
    def roles(self) -> tuple[LayerRole, ...]:
        """The role of every layer, in order."""
        return tuple(_role(self, layer) for layer in range(self.num_hidden_layers))

    @property
    def engram_row_count(self) -> int:
        """Rows that a token reads from one Engram table: n-gram sizes times heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    def check_keep_tokens(self, keep_tokens: int, retractable_tokens: int = 0) -> None:
        """Refuse a replay too short to fill the decoder's window.

        Args:
            keep_tokens: trailing prompt tokens that run through the decoder layers.
            retractable_tokens: most tokens that may be taken back later (rejected drafts).

        Raises:
            ModelLoadError: the window would read positions that were never computed.
        """
        needed = self.sliding_window + retractable_tokens
        if keep_tokens < needed:
            raise ModelLoadError(
                f"yoco_keep_tokens is {keep_tokens}, but must be at least {needed}: the sliding "
                f"window of {self.sliding_window} tokens and {retractable_tokens} that may be "
                "taken back."
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


def _require(holds: bool, field: str, rule: str) -> None:
    if not holds:
        raise ModelLoadError(f"The model configuration is impossible: {field} {rule}.")


_AT_LEAST_ONE: Final = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "max_position_embeddings",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "hc_mult",
    "hc_sinkhorn_iters",
    "engram_vocab_size",
    "engram_n_heads",
    "engram_head_dim",
    "engram_compressed_vocab_size",
)
_POSITIVE: Final = (
    "rope_theta",
    "compress_rope_theta",
    "routed_scaling_factor",
    "swiglu_limit",
    "gate_temp",
    "rms_norm_eps",
    "hc_eps",
)


def _check_ranges(config: ModelConfig) -> None:
    for name in _AT_LEAST_ONE:
        value = getattr(config, name)
        _require(value >= 1, name, f"is {value}, but must be at least 1")
    for name in _POSITIVE:
        value = getattr(config, name)
        _require(value > 0, name, f"is {value}, but must be positive")
    scaling = config.rope_scaling
    for name in ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings"):
        value = getattr(scaling, name)
        _require(value > 0, f"rope_scaling.{name}", f"is {value}, but must be positive")
    _require(
        config.num_experts_per_tok <= config.n_routed_experts,
        "num_experts_per_tok",
        f"is {config.num_experts_per_tok}, but there are {config.n_routed_experts} experts",
    )
    _require(
        config.dtype in ("bfloat16", "float16", "float32"),
        "dtype",
        f"is {config.dtype!r}, but must be bfloat16, float16 or float32",
    )
    if config.quantization is not None:
        block = config.quantization.weight_block_size
        _require(
            all(side >= 1 for side in block), "weight_block_size", "must hold positive numbers"
        )


def _check_attention(config: ModelConfig) -> None:
    for name in ("head_dim", "index_head_dim"):
        value = getattr(config, name)
        _require(
            value % CACHE_GROUP == 0, name, f"is {value}, but must be a multiple of {CACHE_GROUP}"
        )
        _require(
            config.qk_rope_head_dim <= value,
            "qk_rope_head_dim",
            f"is {config.qk_rope_head_dim}, but {name} is only {value}",
        )
    _require(
        config.qk_rope_head_dim % 2 == 0,
        "qk_rope_head_dim",
        f"is {config.qk_rope_head_dim}, but channels rotate in pairs",
    )
    _require(
        config.num_attention_heads % config.o_groups == 0,
        "o_groups",
        f"is {config.o_groups}, which does not divide {config.num_attention_heads} heads",
    )


def _check_layer_ids(config: ModelConfig, name: str) -> None:
    ids: tuple[int, ...] = getattr(config, name)
    _require(
        all(0 <= layer < config.num_hidden_layers for layer in ids),
        name,
        f"is {list(ids)}, but there are {config.num_hidden_layers} layers",
    )
    _require(
        list(ids) == sorted(set(ids)),
        name,
        f"is {list(ids)}, but must be in strict ascending order",
    )


def _check_sources(config: ModelConfig) -> None:
    ratios, layers = config.compress_ratios, config.num_hidden_layers
    _require(
        len(ratios) == layers, "compress_ratios", f"has {len(ratios)} entries for {layers} layers"
    )
    _require(set(ratios) <= {0, 1, 2}, "compress_ratios", "holds something other than 0, 1 and 2")
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        _check_layer_ids(config, name)
    kv_sources, index_sources = config.kv_source_layer_ids, config.index_source_layer_ids
    _require(bool(kv_sources), "kv_source_layer_ids", "is empty")
    strays = sorted(set(kv_sources) - set(index_sources))
    _require(not strays, "index_source_layer_ids", f"lacks {strays}, which write global KV")
    for source in index_sources:
        _require(
            ratios[source] > 0,
            "index_source_layer_ids",
            f"names layer {source}, whose entry in compress_ratios is 0",
        )
    for layer, ratio in enumerate(ratios):
        newest = _newest_source(kv_sources, layer)
        _require(
            ratio == 0 or (newest is not None and ratios[newest] == ratio),
            "compress_ratios",
            f"says {ratio} for layer {layer}, but no layer of that ratio writes global KV for it",
        )
    first = kv_sources[-1]
    decoder = tuple(layer for layer, ratio in enumerate(ratios) if ratio == 1)
    _require(
        decoder == tuple(range(first, layers)),
        "compress_ratios",
        f"must be 1 from the last kv source (layer {first}) on, and nowhere before it",
    )


def _check_candidates(config: ModelConfig) -> None:
    source = config.candidate_source_layer_id
    if source is None:
        return
    _require(
        source in config.index_source_layer_ids,
        "candidate_source_layer_id",
        f"is {source}, which is not in index_source_layer_ids",
    )
    _require(
        source >= config.kv_source_layer_ids[-1],
        "candidate_source_layer_id",
        f"is {source}, but later layers read the global KV of another source",
    )
    blocks, size = config.candidate_topk_blocks, config.candidate_block_size
    _require(blocks >= 1, "candidate_topk_blocks", f"is {blocks}, but must be at least 1")
    _require(size >= 1, "candidate_block_size", f"is {size}, but must be at least 1")
    # The newest block may hold one visible entry only; the kept ones must still fill a top-k.
    sure = (blocks - 1) * size + 1
    _require(
        sure >= config.index_topk,
        "candidate_topk_blocks",
        f"keeps only {sure} entries for certain, but index_topk is {config.index_topk}",
    )


def _check_engram(config: ModelConfig) -> None:
    _check_layer_ids(config, "engram_layer_ids")
    rows, layers = config.engram_num_embeddings, config.engram_layer_ids
    _require(
        len(rows) == len(layers),
        "engram_num_embeddings",
        f"has {len(rows)} entries for {len(layers)} layers in engram_layer_ids",
    )
    _require(
        config.engram_max_ngram_size >= 2,
        "engram_max_ngram_size",
        f"is {config.engram_max_ngram_size}, but must be at least 2",
    )
    _require(
        0 <= config.engram_pad_token_id < config.vocab_size,
        "engram_pad_token_id",
        f"is {config.engram_pad_token_id}, which is not in the vocabulary",
    )
