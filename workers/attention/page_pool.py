"""The device's KV memory."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hicache.layout import CacheLayout
from workers.attention.batch import BatchTensors
from workers.contract import PAGE_TOKENS


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
        """Write KV [T,Hk,D] at (pages, offsets) and return it rounded to the pool's dtype.

        A token thus sees the same KV in this step and in later ones.
        """
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


def written_places(tensors: BatchTensors) -> tuple[Tensor, Tensor]:
    """Page, and offset within the page, of each row's KV; both int64 [T]."""
    columns = tensors.positions // PAGE_TOKENS
    pages = tensors.block_table[tensors.row_slots, columns].long()
    return pages, tensors.positions % PAGE_TOKENS


def _zeroed_rows(num_pages: int, page_bytes: int, device: torch.device) -> Tensor:
    """Zeros keep what a mask hides finite.

    On a CPU they come from calloc, so the machine's memory is taken page by page as sequences first use it,
    not at start.
    """
    if device.type == "cpu":
        return torch.from_numpy(np.zeros((num_pages, page_bytes), np.uint8))
    return torch.zeros(num_pages, page_bytes, dtype=torch.uint8, device=device)
