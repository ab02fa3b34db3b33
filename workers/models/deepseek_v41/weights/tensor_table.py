"""Which tensors a DeepSeek-V4.1 checkpoint holds: released names, shapes, and how each may be stored.

No torch here: the daemon asks which tensors will take memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from workers.models.deepseek_v41.config.model_config import LayerRole, ModelConfig

Kind = Literal["plain", "matrix", "expert", "table"]
"""plain: floats only. matrix: also FP8 blocks. expert: also FP8 blocks or packed FP4. table: also
FP8 rows. What a tensor really is, its dtype in the file says."""

Shape = tuple[int, ...]

FLOAT_DTYPES: Final = frozenset({"F32", "F16", "BF16"})
FP8_DTYPE: Final = "F8_E4M3"
BYTE_DTYPES: Final = frozenset({"I8", "U8"})
SCALE_DTYPES: Final = frozenset({"F8_E8M0", "U8"})
FP4_GROUP: Final = 32
"""Input channels of an FP4 expert that share a scale."""
ROW_GROUP: Final = 32
"""Channels of an Engram row that share a scale."""

EXPERT_NAME: Final = re.compile(r"(?P<module>.+\.experts)\.(?P<id>\d+)\.(?P<matrix>w[123])\.weight")
"""Name of a routed expert's matrix."""


@dataclass(frozen=True)
class ExpectedTensor:
    """A tensor as the model sees it: `shape` counts values, not packed bytes."""

    shape: Shape
    kind: Kind
    released: str
    """Its dtype in the published checkpoint."""
    required: bool = True


@dataclass(frozen=True)
class StoredShape:
    """Shapes in the file of a tensor stored as a given dtype."""

    data: Shape
    scale: Shape | None
    """None: an unquantised tensor, which has no scale."""


def scale_name(name: str) -> str:
    return name.removesuffix("weight") + "scale"


def is_engram_table(name: str) -> bool:
    return ".engram.embed." in name


def expected_tensors(config: ModelConfig) -> dict[str, ExpectedTensor]:
    width = config.hidden_size
    tensors = {
        "embed.weight": ExpectedTensor((config.vocab_size, width), "plain", "BF16"),
        "head.weight": ExpectedTensor((config.vocab_size, width), "plain", "BF16"),
        "norm.weight": ExpectedTensor((width,), "plain", "BF16"),
    }
    for role in config.roles:
        for name, tensor in _layer_tensors(config, role):
            tensors[f"layers.{role.layer}.{name}"] = tensor
    return tensors


def stored_shape(
    tensor: ExpectedTensor, dtype: str, block: tuple[int, int] | None
) -> StoredShape | None:
    """How `tensor` lies in a file as `dtype`, or None if it cannot be stored that way.

    `block`: rows and columns per scale of FP8 matrices; None: the model is not quantised.
    """
    if dtype in FLOAT_DTYPES:
        return StoredShape(tensor.shape, None)
    if block is None or tensor.kind == "plain":
        return None
    rows, columns = tensor.shape
    if dtype == FP8_DTYPE and tensor.kind == "table":
        return StoredShape(tensor.shape, (rows, columns // ROW_GROUP))
    if dtype == FP8_DTYPE:
        return StoredShape(tensor.shape, (-(-rows // block[0]), -(-columns // block[1])))
    if dtype in BYTE_DTYPES and tensor.kind == "expert":
        return StoredShape((rows, columns // 2), (rows, columns // FP4_GROUP))
    return None


def _layer_tensors(config: ModelConfig, role: LayerRole) -> Iterator[tuple[str, ExpectedTensor]]:
    for part in (
        _stream_tensors(config),
        _attention_tensors(config),
        _compressor_tensors(config, role) if role.writes_kv else {},
        _indexer_tensors(config, role) if role.picks_topk else {},
        _expert_tensors(config),
        _engram_tensors(config, role) if role.has_engram else {},
    ):
        yield from part.items()


def _stream_tensors(config: ModelConfig) -> Mapping[str, ExpectedTensor]:
    streams, width = config.hc_mult, config.hidden_size
    mixes = (2 + streams) * streams
    tensors = {
        "attn_norm.weight": ExpectedTensor((width,), "plain", "BF16"),
        "ffn_norm.weight": ExpectedTensor((width,), "plain", "BF16"),
    }
    for sublayer in ("attn", "ffn"):
        tensors[f"hc_{sublayer}_fn"] = ExpectedTensor((mixes, streams * width), "plain", "F32")
        tensors[f"hc_{sublayer}_base"] = ExpectedTensor((mixes,), "plain", "F32")
        tensors[f"hc_{sublayer}_scale"] = ExpectedTensor((3,), "plain", "F32")
    return tensors


def _attention_tensors(config: ModelConfig) -> Mapping[str, ExpectedTensor]:
    width, heads, dim = config.hidden_size, config.num_attention_heads, config.head_dim
    latent = config.o_groups * config.o_lora_rank
    return {
        "attn.wq_a.weight": ExpectedTensor((config.q_lora_rank, width), "matrix", FP8_DTYPE),
        "attn.q_norm.weight": ExpectedTensor((config.q_lora_rank,), "plain", "BF16"),
        "attn.wq_b.weight": ExpectedTensor((heads * dim, config.q_lora_rank), "matrix", FP8_DTYPE),
        "attn.wkv.weight": ExpectedTensor((dim, width), "matrix", FP8_DTYPE),
        "attn.kv_norm.weight": ExpectedTensor((dim,), "plain", "BF16"),
        "attn.wo_a.weight": ExpectedTensor(
            (latent, heads // config.o_groups * dim), "matrix", FP8_DTYPE
        ),
        "attn.wo_b.weight": ExpectedTensor((width, latent), "matrix", FP8_DTYPE),
        "attn.attn_sink": ExpectedTensor((heads,), "plain", "F32"),
    }


def _compressor_tensors(config: ModelConfig, role: LayerRole) -> Mapping[str, ExpectedTensor]:
    projection = ExpectedTensor((config.head_dim, config.hidden_size), "matrix", "BF16")
    tensors = {
        "attn.compressor.wkv.weight": projection,
        "attn.compressor.norm.weight": ExpectedTensor((config.head_dim,), "plain", "BF16"),
    }
    if role.ratio > 1:
        tensors["attn.compressor.wgate.weight"] = projection
    return tensors


def _indexer_tensors(config: ModelConfig, role: LayerRole) -> Mapping[str, ExpectedTensor]:
    heads, dim = config.index_n_heads, config.index_head_dim
    tensors = {
        "attn.indexer.wq_b.weight": ExpectedTensor(
            (heads * dim, config.q_lora_rank), "matrix", FP8_DTYPE
        ),
        "attn.indexer.weights_proj.weight": ExpectedTensor(
            (heads, config.hidden_size), "matrix", "BF16"
        ),
    }
    if role.writes_kv:
        tensors["attn.indexer.wk.weight"] = ExpectedTensor((dim, config.head_dim), "matrix", "BF16")
        tensors["attn.indexer.k_norm.weight"] = ExpectedTensor((dim,), "plain", "BF16")
    return tensors


def _expert_tensors(config: ModelConfig) -> Mapping[str, ExpectedTensor]:
    width, inner, experts = (
        config.hidden_size,
        config.moe_intermediate_size,
        config.n_routed_experts,
    )
    tensors = {
        "ffn.gate.weight": ExpectedTensor((experts, width), "plain", "BF16"),
        "ffn.gate.bias": ExpectedTensor((experts,), "plain", "F32"),
        # Read for image tokens only.
        "ffn.gate.bias_vl": ExpectedTensor((experts,), "plain", "F32", required=False),
    }
    routed = [(f"ffn.experts.{expert}", "I8") for expert in range(experts)]
    for name, dtype in [*routed, ("ffn.shared_experts", FP8_DTYPE)]:
        kind: Kind = "expert" if dtype == "I8" else "matrix"
        tensors[f"{name}.w1.weight"] = ExpectedTensor((inner, width), kind, dtype)
        tensors[f"{name}.w2.weight"] = ExpectedTensor((width, inner), kind, dtype)
        tensors[f"{name}.w3.weight"] = ExpectedTensor((inner, width), kind, dtype)
    return tensors


def _engram_tensors(config: ModelConfig, role: LayerRole) -> Mapping[str, ExpectedTensor]:
    streams, width, dim = config.hc_mult, config.hidden_size, config.engram_head_dim
    rows = config.engram_num_embeddings[config.engram_layer_ids.index(role.layer)]
    return {
        "engram.embed.weight": ExpectedTensor((rows, dim), "table", FP8_DTYPE),
        "engram.wkv.weight": ExpectedTensor(
            ((streams + 1) * width, config.engram_row_count * dim), "matrix", FP8_DTYPE
        ),
        "engram.q_weight": ExpectedTensor((streams, width), "plain", "BF16"),
        "engram.k_weight": ExpectedTensor((streams, width), "plain", "BF16"),
    }
