"""One rank's host pool: a self-describing segment of host pages and host states, each a row of bytes.

Layout, all offsets in bytes from the start of the segment:

    0                   what the pool is made for (magic, version, fingerprint, sizes)
    4096                headers of the pages, then headers of the states, 64 bytes each
    next multiple of 4096   pages, packed: neighbours are one run of bytes
    next multiple of 4096   states, packed

A pool that was made for anything else is wiped, never served.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import numpy as np

from hicache.copies.rows import HostRows, RowArray
from hicache.errors import HostPoolError
from hicache.pool.headers import HEADER_DTYPE, PAGE_KIND, STATE_KIND, HeaderTable
from hicache.pool.segment import reserve_segment
from transport.wording import GIB

_ALIGNMENT: Final = 4096
_MAGIC: Final = b"DIHICACH"
_VERSION: Final = 1
_IDENTITY: Final = struct.Struct("<8sI32sQQQQ")


@dataclass(frozen=True)
class PoolGeometry:
    """What a host pool holds. Row sizes in bytes; `state_bytes` 0: the model has no states."""

    fingerprint: str
    """Of the engine's cache layout: what the bytes of a row mean."""
    page_bytes: int
    num_pages: int
    state_bytes: int = 0
    num_states: int = 0

    def __post_init__(self) -> None:
        if self.num_pages < 1:
            raise HostPoolError(
                f"The host prefix cache has no room for a page of {self.page_bytes} bytes: raise "
                "--hicache-size-gb, or turn the cache off with 0."
            )
        if self.state_bytes and self.num_states < 1:
            raise HostPoolError(
                "This model's prefixes can only be reused with its sliding-window states: set "
                "--hicache-state-slots to at least 1, or turn the cache off with --hicache-size-gb 0."
            )

    @classmethod
    def from_budget(
        cls, fingerprint: str, budget_bytes: int, page_bytes: int, state_bytes: int, num_states: int
    ) -> PoolGeometry:
        """As many pages as fit into `budget_bytes`; headers and states come on top.

        Raises:
            HostPoolError: not one page fits, or the model needs states and gets none.
        """
        states = num_states if state_bytes else 0
        return cls(fingerprint, page_bytes, budget_bytes // page_bytes, state_bytes, states)

    @property
    def pages_offset(self) -> int:
        headers = (self.num_pages + self.num_states) * HEADER_DTYPE.itemsize
        return _aligned(_ALIGNMENT + headers)

    @property
    def states_offset(self) -> int:
        return _aligned(self.pages_offset + self.num_pages * self.page_bytes)

    @property
    def total_bytes(self) -> int:
        return _aligned(self.states_offset + self.num_states * self.state_bytes)

    def identity(self) -> bytes:
        return _IDENTITY.pack(
            _MAGIC,
            _VERSION,
            blake2b(self.fingerprint.encode(), digest_size=32).digest(),
            self.page_bytes,
            self.num_pages,
            self.state_bytes,
            self.num_states,
        )


class HostPool:
    """A mapped host pool. One process has it at a time."""

    def __init__(self, fd: int, geometry: PoolGeometry, available_bytes: int) -> None:
        """Map the segment `fd`; give it its memory and wipe it unless it is a pool of `geometry`.

        Raises:
            HostPoolError: there is not enough memory, or another process has the pool.
        """
        self.geometry = geometry
        self._lock = _lock(fd)
        try:
            reserve_segment(fd, geometry.total_bytes, available_bytes)
            self._map = _map(fd, geometry.total_bytes)
        except HostPoolError:
            os.close(self._lock)
            raise
        self.memory: RowArray = np.frombuffer(self._map, np.uint8)
        """The whole segment, for page-locking."""
        self.pages = HostRows.packed(
            self.memory[geometry.pages_offset :], geometry.page_bytes, geometry.num_pages
        )
        self.states = HostRows.packed(
            self.memory[geometry.states_offset :], geometry.state_bytes, geometry.num_states
        )
        self.page_headers = self._headers(0, geometry.num_pages, PAGE_KIND)
        self.state_headers = self._headers(geometry.num_pages, geometry.num_states, STATE_KIND)
        identity = geometry.identity()
        self.recovered = self._map[: len(identity)] == identity
        """Whether this pool existed before, so that its valid rows can be served."""
        if not self.recovered:
            self._format(identity)

    def close(self) -> None:
        """Unmap. The content stays for whoever maps the segment next.

        Raises:
            BufferError: somebody still holds a view of the rows.
        """
        self.memory = np.empty(0, np.uint8)
        self.pages = self.states = HostRows.of(np.empty((0, 0), np.uint8))
        self.page_headers.let_go()
        self.state_headers.let_go()
        self._map.close()
        os.close(self._lock)

    def _format(self, identity: bytes) -> None:
        # While the tables are cleared the pool must not look like any pool.
        self._map[: len(identity)] = bytes(len(identity))
        self.page_headers.clear()
        self.state_headers.clear()
        self._map[: len(identity)] = identity

    def _headers(self, first: int, count: int, kind: int) -> HeaderTable:
        offset = _ALIGNMENT + first * HEADER_DTYPE.itemsize
        size = count * HEADER_DTYPE.itemsize
        return HeaderTable(self.memory[offset : offset + size].view(HEADER_DTYPE), kind)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _lock(fd: int) -> int:
    """Claim the pool for this process, until it closes the returned descriptor or ends.

    The inherited descriptor shares its locks with all who inherited it; one opened anew does not.
    """
    try:
        lock = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise HostPoolError(
            f"The memory of the host prefix cache cannot be opened as descriptor {fd} "
            f"({error.strerror}); it must be inherited from the daemon, and /proc be mounted."
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise HostPoolError(
            "The host pool is still mapped by another process of this rank; wait until that one "
            "has ended."
        ) from error
    return lock


def _map(fd: int, size: int) -> mmap.mmap:
    try:
        return mmap.mmap(fd, size)
    except OSError as error:
        raise HostPoolError(
            f"The host prefix cache of {size / GIB:.2f} GiB cannot be mapped ({error.strerror}): "
            "raise the limit on address space (ulimit -v), or lower --hicache-size-gb."
        ) from error
