"""Types of the names that travel between processes, so that they are never mixed up."""

from __future__ import annotations

from typing import Final, NewType

RequestId = NewType("RequestId", str)
"""One HTTP request for one prompt; chosen by the frontend, unique within the instance."""

ProcessName = NewType("ProcessName", str)
"""Role and number of a process, `worker/0`; also its ZMQ identity."""

ROUTER_NAME: Final = ProcessName("router")
"""There is one router per instance."""

DpRank = NewType("DpRank", int)
"""Attention-data-parallel rank: the number of a worker."""

NO_RANK: Final = DpRank(-1)
"""A request that is at no worker."""


def process_name(role: str, number: int) -> ProcessName:
    """The name of process `number` of a role, e.g. `frontend/1`."""
    return ProcessName(f"{role}/{number}")
