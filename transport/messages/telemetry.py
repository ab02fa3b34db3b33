"""What processes report of themselves: every process to the daemon, PUB/SUB."""

from __future__ import annotations

from typing import Literal

import msgspec

from transport.ids import DpRank, ProcessName, RequestId
from transport.messages.base import Message
from transport.messages.generate import StageTimes
from transport.telemetry.values import HistogramValue, QueueStats, SocketStats

ProcessState = Literal["starting", "loading", "ready", "draining", "stopping"]


class RequestRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One live request as the router sees it, for `inspect requests`."""

    request_id: RequestId
    stage: str
    frontend: ProcessName
    rank: DpRank
    prompt_tokens: int
    output_tokens: int
    choices: int
    stages: StageTimes
    stage_since: float = 0.0
    """CLOCK_MONOTONIC seconds at which it entered its present stage, for the last time."""


class Snapshot(Message, frozen=True):
    """State of one process. Metrics are cumulative, so that a lost snapshot loses nothing.

    A metric's key is (name, label value ...); the daemon knows each name's label names."""

    name: ProcessName
    pid: int
    state: ProcessState
    detail: str
    progress: int
    """Grows with every turn of the process's main loop: a hung process stops counting."""
    counters: dict[str, list[tuple[tuple[str, ...], float]]] = {}
    gauges: dict[str, list[tuple[tuple[str, ...], float]]] = {}
    histograms: dict[str, list[tuple[tuple[str, ...], HistogramValue]]] = {}
    sockets: list[SocketStats] = []
    queues: list[QueueStats] = []
    requests: list[RequestRow] = []
    """Router only; at most the first thousand."""
