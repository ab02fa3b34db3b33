"""The table of slot headers inside a host pool: which slot holds what, for whoever maps it next.

A header says VALID only while its row is whole: it says WRITING before the first byte of a new row
is copied, and VALID is the last word stored after the copy. A process may be killed between any two
stores; what it leaves is either a valid header of a whole row or a slot that counts as free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hicache.keys import KEY_BYTES

SlotArray = npt.NDArray[np.int32]

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
        ("generation", "<u4"),  # counts the rows that were written into the slot
        ("last_use", "<u8"),  # not covered by the checksum: it changes with every hit
        ("checksum", "<u8"),
    ]
)
_Words = npt.NDArray[np.uint64]


class ValidSlot(NamedTuple):
    """What one valid header says."""

    slot: int
    key: bytes
    parent: bytes
    depth: int
    last_use: int


class HeaderTable:
    """Headers of all slots of one kind. `table` is a view of the pool's memory."""

    def __init__(self, table: npt.NDArray[np.void], kind: int) -> None:
        self._table = table
        self._kind = kind

    @property
    def count(self) -> int:
        return len(self._table)

    def clear(self) -> None:
        self._table.view(np.uint8)[:] = 0

    def begin_write(self, slots: SlotArray) -> None:
        self._table["status"][slots] = WRITING
        self._table["generation"][slots] += 1

    def publish(
        self,
        slots: SlotArray,
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        depths: npt.NDArray[np.uint32],
        stamp: int,
    ) -> None:
        """Say that the rows are whole and what they are. Shapes: [n] each; `slots` are distinct."""
        table = self._table
        table["key"][slots] = _words(keys)
        table["parent"][slots] = _words(parents)
        table["kind"][slots] = self._kind
        table["depth"][slots] = depths
        table["last_use"][slots] = stamp
        table["checksum"][slots] = _checksums(table[slots])
        table["status"][slots] = VALID

    def invalidate(self, slots: SlotArray) -> None:
        self._table["status"][slots] = FREE

    def touch(self, slots: SlotArray, stamp: int) -> None:
        self._table["last_use"][slots] = stamp

    def slots_with_status(self, status: int) -> SlotArray:
        return np.flatnonzero(self._table["status"] == status).astype(np.int32)

    def damaged(self) -> SlotArray:
        """Slots that claim to be valid with a header that cannot be right."""
        slots = self.slots_with_status(VALID)
        headers = self._table[slots]
        right = (headers["checksum"] == _checksums(headers)) & (headers["kind"] == self._kind)
        bad: SlotArray = slots[~right]
        return bad

    def valid_slots(self) -> list[ValidSlot]:
        """All valid headers, parents before their children."""
        slots = self.slots_with_status(VALID)
        headers = self._table[slots]
        order = np.argsort(headers["depth"], kind="stable")
        slots, headers = slots[order], headers[order]
        keys, parents = headers["key"].tobytes(), headers["parent"].tobytes()
        return [
            ValidSlot(
                slot, keys[at : at + KEY_BYTES], parents[at : at + KEY_BYTES], depth, last_use
            )
            for at, slot, depth, last_use in zip(
                range(0, len(keys), KEY_BYTES),
                slots.tolist(),
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
