"""Rows in a tensor."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hicache.copies.rows import HostRows, Rows


@dataclass(frozen=True)
class GpuRows(Rows):
    """Rows in a GPU's memory."""

    memory: torch.Tensor = field(repr=False)
    """uint8, shape [count, row_bytes]."""


def tensor_rows(memory: torch.Tensor) -> GpuRows | HostRows:
    """The rows of a uint8 tensor of shape [count, row_bytes], on whatever device it is."""
    if memory.device.type == "cpu":
        return HostRows.of(memory.numpy())
    count, row_bytes = memory.shape
    return GpuRows(memory.data_ptr(), memory.stride(0), row_bytes, count, memory)
