"""What a `Snapshot` is made of: values that processes report of themselves."""

from __future__ import annotations

import msgspec


class HistogramValue(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Cumulative state of one histogram: upper bounds, counts per bucket (the last one counts what
    exceeds every bound), and the sum of the values."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class SocketStats(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Traffic of one socket since the process started."""

    name: str
    received: int
    received_bytes: int
    sent: int
    sent_bytes: int
    refused: int
    """Attempts to send that failed: the peer was gone, or did not read."""


class QueueStats(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Depth of one queue now, its high-water mark and its bound."""

    name: str
    depth: int
    high_water: int
    capacity: int
