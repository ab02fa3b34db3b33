"""Attention on NVIDIA GPUs: pages are read in place, whatever the lengths of the sequences."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from workers.attention.backend import AttentionBackend
from workers.attention.batch import Batch, BatchTensors, StepUpload
from workers.attention.math import AttentionOptions
from workers.attention.page_pool import PagePool
from workers.attention.torch_attention import TorchAttention
from workers.attention.triton.hopper_prefill import hopper_prefill, is_covered
from workers.attention.triton.paged_decode import (
    DecodePlan,
    choose_key_block,
    choose_programs,
    paged_decode,
    plan_decode,
)
from workers.attention.triton.paged_prefill import list_tiles, paged_prefill
from workers.attention.triton.store import store

_LARGEST_DIM: Final = 256


def create_attention(pool: PagePool) -> AttentionBackend:
    """For a pool on an NVIDIA GPU. Larger heads than the kernels are written for are left to PyTorch."""
    if max(view.shape[3] for view in (*pool.keys, *pool.values)) > _LARGEST_DIM:
        return TorchAttention(pool)
    return TritonAttention(pool)


class TritonAttention:
    """Implements `AttentionBackend`.

    A row at a negative position is padding: nothing is stored for it, and its output in a decode step is 0.
    """

    captures_decodes = True

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        device = pool.rows.device
        self._processors = (
            torch.cuda.get_device_properties(device).multi_processor_count
            if device.type == "cuda"
            else 1
        )
        self._tiles: Tensor | None = None
        """Of a prompt step; None: a decode step."""
        self._tensors: BatchTensors | None = None
        self._plans: dict[tuple[int | None, int, int], DecodePlan] = {}
        """Of a decode step: by window, key heads and keys a block. Layers share them."""

    def prepare(self, batch: Batch, upload: StepUpload) -> None:
        self._tensors = None
        prompts = not batch.plan.decodes
        self._tiles = upload.put(list_tiles(batch.segments)) if prompts else None

    def begin(self, tensors: BatchTensors) -> None:
        self._tensors = tensors
        self._plans = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        tensors = self._tensors
        assert tensors is not None, "a layer attends outside of a step"
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        store(key, value, keys, values, tensors)
        if self._tiles is not None:
            prefill = hopper_prefill if is_covered(query, keys, values) else paged_prefill
            return prefill(query, keys, values, tensors.block_table, self._tiles, options)
        plan = self._plan(tensors, query, keys, values, options.window)
        return paged_decode(query, keys, values, tensors.block_table, plan, options)

    def _plan(
        self, tensors: BatchTensors, query: Tensor, keys: Tensor, values: Tensor, window: int | None
    ) -> DecodePlan:
        kv_heads = keys.shape[2]
        key_block = choose_key_block(query, keys, values)
        key = (window, kv_heads, key_block)
        if key not in self._plans:
            self._plans[key] = plan_decode(
                tensors.positions,
                tensors.slots,
                tensors.block_table,
                kv_heads=kv_heads,
                window=window,
                programs=choose_programs(len(query), kv_heads, self._processors),
                key_block=key_block,
            )
        return self._plans[key]
