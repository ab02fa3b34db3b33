"""Rates out of counters that only grow."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from daemon.inspection.report_types import StatusReport, WorkDone

WINDOW_SECONDS: Final = 5.0
"""Processes report twice a second, so a shorter window would mostly show when they did."""


@dataclass(frozen=True)
class Rates:
    """Per second; None while there are no two samples."""

    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    requests: float | None = None


class Throughput:
    """The samples of the last seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, WorkDone]] = deque()

    def add(self, status: StatusReport) -> None:
        samples, now = self._samples, status.uptime_seconds
        if samples and now < samples[-1][0]:
            samples.clear()
        samples.append((now, status.work))
        # The oldest one kept is the youngest that is at least a window old.
        while len(samples) > 2 and now - samples[1][0] >= WINDOW_SECONDS:
            samples.popleft()

    def rates(self) -> Rates:
        if len(self._samples) < 2:
            return Rates()
        (began, first), (ended, last) = self._samples[0], self._samples[-1]
        seconds = ended - began
        if seconds <= 0:
            return Rates()
        return Rates(
            prompt_tokens=(last.prompt_tokens - first.prompt_tokens) / seconds,
            generation_tokens=(last.generation_tokens - first.generation_tokens) / seconds,
            requests=(last.requests - first.requests) / seconds,
        )
