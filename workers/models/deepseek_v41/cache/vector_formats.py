"""How the vectors of each cache become bytes and back: plain numbers, or the compact records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from workers.models.deepseek_v41.layout.cache_formats import GLOBAL_KV, INDEX_KEY, WINDOW_KV

if TYPE_CHECKING:
    from workers.models.deepseek_v41.config.model_config import ModelConfig
    from workers.models.deepseek_v41.layout.cache_formats import RecordFormat
    from workers.models.deepseek_v41.layout.row_layout import KVFormat


class VectorFormat(Protocol):
    """Converts vectors that are stored one by one to bytes and back."""

    def encode(self, vectors: Tensor) -> Tensor:
        """[..., D] -> uint8 [..., record bytes]."""
        ...

    def decode(self, records: Tensor) -> Tensor:
        """uint8 [..., record bytes] -> [..., D] in the compute type."""
        ...


class IndexFormat(Protocol):
    """Converts index keys to bytes and back. Within a page their scales lie apart from their values."""

    record_bytes: int

    def rounded(self, vectors: Tensor) -> Tensor: ...

    def encode_parts(self, keys: Tensor) -> list[tuple[int, Tensor]]:
        """Sections of a page: bytes per key, and uint8 [G, bytes] for keys [G,Di]."""
        ...

    def decode_page(self, pages: Tensor, entries: int) -> Tensor:
        """uint8 [..., entries * record_bytes] -> [..., entries, Di] in the compute type."""
        ...


@dataclass(frozen=True)
class VectorFormats:
    window: VectorFormat
    main: VectorFormat
    index: IndexFormat


class PlainVectors:
    """Stores plain numbers of one type."""

    def __init__(self, stored: torch.dtype, compute: torch.dtype, width: int) -> None:
        self._stored = stored
        self._compute = compute
        self.record_bytes = width * stored.itemsize

    def encode(self, vectors: Tensor) -> Tensor:
        return vectors.to(self._stored).contiguous().view(torch.uint8)

    def decode(self, records: Tensor) -> Tensor:
        return records.view(self._stored).to(self._compute)

    def rounded(self, vectors: Tensor) -> Tensor:
        return vectors

    def encode_parts(self, keys: Tensor) -> list[tuple[int, Tensor]]:
        return [(self.record_bytes, self.encode(keys))]

    def decode_page(self, pages: Tensor, entries: int) -> Tensor:
        return self.decode(torch.unflatten(pages, -1, (entries, self.record_bytes)))


class CompactVectors:
    """Stores small floats with one scale per group of channels; see `cache_formats`."""

    def __init__(self, record: RecordFormat, compute: torch.dtype, width: int) -> None:
        self._record = record
        self._compute = compute
        self._data_bytes = record.data_bytes(width)
        self.record_bytes = record.record_bytes(width)

    def encode(self, vectors: Tensor) -> Tensor:
        return self._record.encode(vectors)

    def decode(self, records: Tensor) -> Tensor:
        return self._record.decode(records).to(self._compute)

    def rounded(self, vectors: Tensor) -> Tensor:
        return self._record.rounded(vectors)

    def encode_parts(self, keys: Tensor) -> list[tuple[int, Tensor]]:
        data, scales = self._record.quantize(keys)
        return [(data.shape[-1], data), (scales.shape[-1], scales)]

    def decode_page(self, pages: Tensor, entries: int) -> Tensor:
        border = entries * self._data_bytes
        data = torch.unflatten(pages[..., :border], -1, (entries, -1))
        scales = torch.unflatten(pages[..., border:], -1, (entries, -1))
        keys = self._record.dequantize(data.contiguous(), scales.contiguous())
        return keys.to(self._compute)


def vector_formats(config: ModelConfig, kv_format: KVFormat, compute: torch.dtype) -> VectorFormats:
    head, index = config.head_dim, config.index_head_dim
    if kv_format == "compact":
        return VectorFormats(
            window=CompactVectors(WINDOW_KV, compute, head),
            main=CompactVectors(GLOBAL_KV, compute, head),
            index=CompactVectors(INDEX_KEY, compute, index),
        )
    stored: torch.dtype = getattr(torch, kv_format)
    return VectorFormats(
        window=PlainVectors(stored, compute, head),
        main=PlainVectors(stored, compute, head),
        index=PlainVectors(stored, compute, index),
    )
