"""What may be told of a running instance: read-only, for metrics, inspection and status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from daemon.supervision.supervisor import Child
from transport.ids import ProcessName
from transport.messages.from_daemon import NO_KEYS, ApiKeys, InstanceState
from transport.telemetry.values import SocketStats


@dataclass(frozen=True)
class InstanceView:
    """The instance now. Times are CLOCK_MONOTONIC seconds."""

    instance: str
    state: InstanceState
    reason: str
    """Why it is not ready; empty if it is."""
    pid: int
    url: str
    model_name: str
    accelerator: str
    run_dir: str
    started_at: float
    now: float
    children: Mapping[ProcessName, Child]
    sockets: Sequence[SocketStats] = ()
    """The daemon's own; those of the children are in their snapshots."""
    keys: ApiKeys = NO_KEYS
    unconfirmed: Sequence[ProcessName] = ()
    """The frontends that are not known to act on the present status and keys."""
