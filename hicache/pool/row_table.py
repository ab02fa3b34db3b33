"""The rows of one kind in a host pool, pages or states: which are free, and what the others hold.

A row's header and its place among the free rows change together, in the order that makes a kill at any
moment harmless: a header is invalid before its row can be handed out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from hicache.copies.runs import IndexArray
from hicache.pool.headers import VALID, WRITING, HeaderTable
from hicache.pool.run_allocator import RunAllocator


class RowTable:
    """A row is free, being written, valid, or kept by somebody who reads it. Not thread-safe."""

    def __init__(self, headers: HeaderTable, kept: Sequence[int]) -> None:
        """All rows but `kept`, which are valid, are free."""
        self._headers = headers
        self._free = RunAllocator(headers.count, kept)
        lost = np.ones(headers.count, np.bool_)
        lost[kept] = False
        headers.invalidate(np.flatnonzero(lost).astype(np.int32))

    @property
    def num_free(self) -> int:
        return self._free.num_free

    def take(self, count: int) -> IndexArray:
        rows = self._free.take(count)
        self._headers.begin_write(rows)
        return rows

    def publish(
        self,
        rows: IndexArray,
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        depths: Sequence[int],
        stamp: int,
    ) -> None:
        self._headers.publish(rows, keys, parents, np.array(depths, np.uint32), stamp)

    def touch(self, rows: IndexArray, stamp: int) -> None:
        self._headers.touch(rows, stamp)

    def free(self, rows: Iterable[int] | IndexArray) -> None:
        freed = np.fromiter(rows, np.int32)
        self._headers.invalidate(freed)
        self._free.give_back(freed)

    def invalidate_all(self) -> None:
        self._headers.invalidate(self._headers.rows_with_status(VALID))

    def check_integrity(
        self, valid: Collection[tuple[bytes, int, int]], kept: Iterable[int], writing: Sequence[int]
    ) -> None:
        """Compare free rows and headers with what their users say, O(rows).

        Args:
            valid: key, row and depth of all rows that can be found.
            kept: rows that cannot, and are being read.
            writing: rows taken and neither published nor freed.

        Raises:
            AssertionError: they differ.
        """
        self._free.check_integrity([*(row for _, row, _ in valid), *kept, *writing])
        found = self._headers.valid_headers()
        if {(v.key, v.row, v.depth) for v in found} != set(valid):
            raise AssertionError("the pool's headers are not what the index finds")
        being_written = self._headers.rows_with_status(WRITING).tolist()
        if len(self._headers.damaged()) or sorted(writing) != being_written:
            raise AssertionError("a header is damaged, or says writing of another row")
