"""What a page and a state slot of DeepSeek-V4.1 consist of, byte by byte.

A page holds, for each kv source in layer order, the index keys and then the main KV of the entries
that its 128 tokens complete. A state holds the window rings of the encoder, then those of the
decoder, then the compressor tails, so that what a prefix cache keeps comes first. The place of
position p in a ring is p modulo its length.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm, prod
from typing import TYPE_CHECKING, Final, Literal

from hicache.layout import TensorSlice
from workers.contract import PAGE_TOKENS
from workers.models.deepseek_v41.layout.cache_formats import GLOBAL_KV, INDEX_KEY, WINDOW_KV

if TYPE_CHECKING:
    from workers.models.deepseek_v41.config.model_config import ModelConfig

KVFormat = Literal["float32", "bfloat16", "float16", "compact"]
"""`compact`: FP4 main KV and index keys, FP8 windows, in the formats the model was trained with."""

BACKTRACK_TOKENS: Final = 6
"""Ring entries beyond the window, as in the state rows of the model's released engine: so many of the
newest positions can be taken back while a full window stays available."""

_TENSOR_ALIGNMENT: Final = 32
_PAGE_ALIGNMENT: Final = 128
_SIZE_OF: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}


@dataclass(frozen=True)
class RecordSizes:
    """Bytes of one entry in each cache."""

    main: int
    index_data: int
    index_scales: int
    """0 where the format has none; the scales of a page follow its data."""
    window: int


@dataclass(frozen=True)
class RowLayout:
    """Sizes, offsets and names. All offsets are in bytes from the start of the row."""

    kv_format: KVFormat
    records: RecordSizes
    page_bytes: int
    page_tensors: tuple[TensorSlice, ...]
    state_bytes: int
    state_tensors: tuple[TensorSlice, ...]
    encoder_ring: int
    """Entries of an encoder layer's window ring in a device slot."""
    decoder_ring: int
    stored_ring: int
    """Entries of a ring in a stored state."""
    stored_layers: int
    """Number of leading layers whose windows a stored state holds."""
    stored_state_bytes: int
    page_offsets: dict[int, tuple[int, int]]
    """kv source -> where its index keys and its main KV start in a page."""
    window_offsets: tuple[int, ...]
    """By layer: where its ring starts in a state."""
    tail_offsets: dict[int, int]
    """kv source of a ratio above 1 -> where its tail ring starts in a state."""
    tail_rings: dict[int, int]
    """kv source of a ratio above 1 -> entries of its tail ring."""

    def ring_bytes(self, ring: int) -> int:
        return _aligned(ring * self.records.window)


def entries_per_page(ratio: int) -> int:
    return PAGE_TOKENS // ratio


def record_sizes(config: ModelConfig, kv_format: KVFormat) -> RecordSizes:
    head, index = config.head_dim, config.index_head_dim
    if kv_format == "compact":
        index_data = INDEX_KEY.data_bytes(index)
        return RecordSizes(
            main=GLOBAL_KV.record_bytes(head),
            index_data=index_data,
            index_scales=INDEX_KEY.record_bytes(index) - index_data,
            window=WINDOW_KV.record_bytes(head),
        )
    size = _SIZE_OF[kv_format]
    return RecordSizes(head * size, index * size, 0, head * size)


def build_row_layout(
    config: ModelConfig, kv_format: KVFormat, keep_tokens: int, *, store_anchors: bool
) -> RowLayout:
    """Lay out page and state.

    Args:
        config: the model.
        kv_format: how entries are stored.
        keep_tokens: bounded replay; see `CacheLayout.keep_tokens`.
        store_anchors: make the encoder rings long enough for a prefix cache. After a prompt of L tokens it
            wants the states at the last page boundary at or before L and at the last one at or before
            L - keep_tokens; both can then still be cut out.
    """
    records = record_sizes(config, kv_format)
    stored_layers = config.first_decoder_layer if keep_tokens else config.num_hidden_layers
    stored_ring = config.sliding_window + BACKTRACK_TOKENS
    long_ring = stored_ring + (PAGE_TOKENS + max(1, keep_tokens) if store_anchors else 0)
    rings = [
        long_ring if layer < stored_layers else stored_ring
        for layer in range(config.num_hidden_layers)
    ]
    pages = _Row(kv_format)
    page_offsets = {}
    for source in config.kv_source_layer_ids:
        entries = entries_per_page(config.compress_ratios[source])
        index = pages.add(f"layers.{source}.index_keys", entries, records.index_data, aligned=True)
        if records.index_scales:
            pages.add(f"layers.{source}.index_key_scales", entries, records.index_scales)
        main = pages.add(f"layers.{source}.main_kv", entries, records.main, aligned=True)
        page_offsets[source] = (index, main)
    states = _Row(kv_format)
    windows = tuple(
        states.add(f"layers.{layer}.window_kv", ring, records.window, aligned=True)
        for layer, ring in enumerate(rings)
    )
    tail_offsets, tail_rings = {}, {}
    for source in config.kv_source_layer_ids:
        ratio = config.compress_ratios[source]
        if ratio > 1:
            tail_rings[source] = ratio + BACKTRACK_TOKENS - 1
            tail_offsets[source] = states.add_float32(
                f"layers.{source}.compressor_tail", (tail_rings[source], 2, config.head_dim)
            )
    return RowLayout(
        kv_format=kv_format,
        records=records,
        page_bytes=pages.padded(lcm(_PAGE_ALIGNMENT, records.main)),
        page_tensors=tuple(pages.tensors),
        state_bytes=states.padded(lcm(_TENSOR_ALIGNMENT, records.window)),
        state_tensors=tuple(states.tensors),
        encoder_ring=rings[0],
        decoder_ring=rings[-1],
        stored_ring=stored_ring,
        stored_layers=stored_layers,
        stored_state_bytes=stored_layers * _aligned(stored_ring * records.window),
        page_offsets=page_offsets,
        window_offsets=windows,
        tail_offsets=tail_offsets,
        tail_rings=tail_rings,
    )


class _Row:
    def __init__(self, kv_format: KVFormat) -> None:
        self._dtype = "uint8" if kv_format == "compact" else kv_format
        self._end = 0
        self.tensors: list[TensorSlice] = []

    def add(self, name: str, entries: int, record_bytes: int, *, aligned: bool = False) -> int:
        return self._append(
            name, (entries, record_bytes // _SIZE_OF[self._dtype]), self._dtype, aligned
        )

    def add_float32(self, name: str, shape: tuple[int, ...]) -> int:
        return self._append(name, shape, "float32", aligned=True)

    def _append(self, name: str, shape: tuple[int, ...], dtype: str, aligned: bool) -> int:
        offset = _aligned(self._end) if aligned else self._end
        self.tensors.append(TensorSlice(name, offset, shape, dtype))
        self._end = offset + prod(shape) * _SIZE_OF[dtype]
        return offset

    def padded(self, multiple: int) -> int:
        return -(-self._end // multiple) * multiple


def _aligned(size: int) -> int:
    return -(-size // _TENSOR_ALIGNMENT) * _TENSOR_ALIGNMENT
