"""The headers inside a host pool: what each row holds, for whoever maps the pool next.

A header says VALID only while its row is whole: it says WRITING before the first byte of a new content
is copied, and VALID is the last word stored after the copy. A process may be killed between any two
words; what it leaves is either a valid header of a whole row or a row that counts as free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hicache.copies.runs import IndexArray
from hicache.keys import KEY_BYTES

FREE: Final = 0
WRITING: Final = 1
VALID: Final = 2

PAGE_KIND: Final = 1
STATE_KIND: Final = 2

HEADER_DTYPE: Final = np.dtype(
    [
        ("key", "<u8", (2,)),
        ("parent", "<u8", (2,)),
        ("status", "<u4"),
        ("kind", "<u4"),
        ("depth", "<u4"),  # index of the page in its chain
        ("generation", "<u4"),  # counts how often the row was written
        ("last_use", "<u8"),  # not covered by the checksum: it changes with every hit
        ("checksum", "<u8"),
    ]
)
_Words = npt.NDArray[np.uint64]


class ValidHeader(NamedTuple):
    """What one valid header says."""

    row: int
    key: bytes
    parent: bytes
    depth: int
    last_use: int


class HeaderTable:
    """Headers of all host pages, or of all host states. `table` is a view of the pool's memory."""

    def __init__(self, table: npt.NDArray[np.void], kind: int) -> None:
        self._table = table
        self._kind = kind

    @property
    def count(self) -> int:
        return len(self._table)

    def let_go(self) -> None:
        self._table = np.empty(0, HEADER_DTYPE)

    def clear(self) -> None:
        self._table.view(np.uint8)[:] = 0

    def begin_write(self, rows: IndexArray) -> None:
        self._table["status"][rows] = WRITING
        self._table["generation"][rows] += 1

    def publish(
        self,
        rows: IndexArray,
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        depths: npt.NDArray[np.uint32],
        stamp: int,
    ) -> None:
        """Say that the rows are whole and what they are. Shapes: [n] each; `rows` are distinct."""
        table = self._table
        table["key"][rows] = _words(keys)
        table["parent"][rows] = _words(parents)
        table["kind"][rows] = self._kind
        table["depth"][rows] = depths
        table["last_use"][rows] = stamp
        table["checksum"][rows] = _checksums(table[rows])
        table["status"][rows] = VALID

    def invalidate(self, rows: IndexArray) -> None:
        self._table["status"][rows] = FREE

    def touch(self, rows: IndexArray, stamp: int) -> None:
        self._table["last_use"][rows] = stamp

    def rows_with_status(self, status: int) -> IndexArray:
        return np.flatnonzero(self._table["status"] == status).astype(np.int32)

    def damaged(self) -> IndexArray:
        rows = self.rows_with_status(VALID)
        headers = self._table[rows]
        right = (headers["checksum"] == _checksums(headers)) & (headers["kind"] == self._kind)
        bad: IndexArray = rows[~right]
        return bad

    def valid_headers(self) -> list[ValidHeader]:
        rows = self.rows_with_status(VALID)
        headers = self._table[rows]
        order = np.argsort(headers["depth"], kind="stable")
        rows, headers = rows[order], headers[order]
        keys, parents = headers["key"].tobytes(), headers["parent"].tobytes()
        return [
            ValidHeader(
                row, keys[at : at + KEY_BYTES], parents[at : at + KEY_BYTES], depth, last_use
            )
            for at, row, depth, last_use in zip(
                range(0, len(keys), KEY_BYTES),
                rows.tolist(),
                headers["depth"].tolist(),
                headers["last_use"].tolist(),
                strict=True,
            )
        ]


def _words(keys: Sequence[bytes]) -> _Words:
    return np.frombuffer(b"".join(keys), dtype="<u8").reshape(-1, 2)


def _checksums(headers: npt.NDArray[np.void]) -> _Words:
    """A 64-bit mix of everything that stays as it is while the header is valid; never 0 for zeros."""
    parts = [headers["key"][:, 0], headers["key"][:, 1]]
    parts += [headers["parent"][:, 0], headers["parent"][:, 1]]
    parts.append(headers["kind"].astype(np.uint64) << np.uint64(32) | headers["depth"])
    parts.append(headers["generation"].astype(np.uint64))
    total = np.full(len(headers), 0x9E3779B97F4A7C15, dtype=np.uint64)
    for part in parts:
        total ^= part
        total *= np.uint64(0xD6E8FEB86659FD93)
        total ^= total >> np.uint64(32)
    return total
