"""Rows of bytes, wherever they lie: an engine's pool, the host pool, the arena of a handoff.

A copy goes between rows *here*, which steps read and write, and rows *there*, which keep or pass on what
they hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

RowArray = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Rows:
    """`count` rows of `row_bytes` bytes, `pitch` bytes from one to the next. `address` is that of row 0,
    as its device sees it."""

    address: int
    pitch: int
    row_bytes: int
    count: int


@dataclass(frozen=True)
class HostRows(Rows):
    """Rows in the host's memory."""

    memory: RowArray = field(repr=False)
    """Shape [count, row_bytes]."""
    is_page_locked: bool = False

    @classmethod
    def of(cls, memory: RowArray) -> HostRows:
        """The rows of an array of shape [count, row_bytes], whose rows may have gaps between them."""
        count, row_bytes = memory.shape
        return cls(int(memory.ctypes.data), memory.strides[0], row_bytes, count, memory)

    @classmethod
    def packed(cls, arena: RowArray, row_bytes: int, count: int) -> HostRows:
        """`count` rows from the start of an arena of bytes on, without gaps."""
        return cls.of(arena[: count * row_bytes].reshape(count, row_bytes))

    def page_locked(self) -> HostRows:
        return replace(self, is_page_locked=True)
