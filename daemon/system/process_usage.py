"""Memory and CPU time of the instance's processes, read from the kernel."""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil

from daemon.system.process_start import process_age

MIN_INTERVAL_SECONDS = 0.5
"""CPU shares over less than this are noise; the last one is repeated instead."""


@dataclass(frozen=True)
class Usage:
    """What one process uses."""

    rss_bytes: int
    cpu_seconds: float
    """User and system time since its start."""
    cpu_percent: float
    """Share of one core since the sample before (the first time: since its start)."""


@dataclass
class _Sample:
    process: psutil.Process
    taken_at: float
    cpu_seconds: float
    cpu_percent: float


class ProcessUsage:
    """Samples processes; remembers the last sample of each living pid."""

    def __init__(self) -> None:
        self._samples: dict[int, _Sample] = {}

    def read(self, pid: int) -> Usage | None:
        sample = self._samples.get(pid)
        try:
            process = psutil.Process(pid) if sample is None else sample.process
            with process.oneshot():
                times = process.cpu_times()
                rss_bytes = process.memory_info().rss
            age = process_age(pid) if sample is None else 0.0
        except (psutil.Error, OSError):
            self._samples.pop(pid, None)
            return None
        now, cpu_seconds = time.monotonic(), times.user + times.system
        if sample is None:
            share = cpu_seconds / max(age, MIN_INTERVAL_SECONDS)
            sample = _Sample(process, now, cpu_seconds, 100 * share)
            self._samples[pid] = sample
        elif now - sample.taken_at >= MIN_INTERVAL_SECONDS:
            used = max(cpu_seconds - sample.cpu_seconds, 0.0)
            sample.cpu_percent = 100 * used / (now - sample.taken_at)
            sample.taken_at, sample.cpu_seconds = now, cpu_seconds
        return Usage(rss_bytes, cpu_seconds, sample.cpu_percent)

    def keep(self, pids: set[int]) -> None:
        for pid in self._samples.keys() - pids:
            del self._samples[pid]
