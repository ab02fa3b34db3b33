"""When to start a dead child again. No clock and no process in here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FIRST_DELAY_SECONDS: Final = 0.1
MAX_DELAY_SECONDS: Final = 10.0
HEALTHY_SECONDS: Final = 10.0
"""A child that served that long was sound: something else ended it, so a new one starts at once."""
DEATHS_AT_START: Final = 3
"""Deaths of one child before the instance has ever been ready that fail the start."""


@dataclass
class RestartPolicy:
    """Exponential back-off for one child that ends before it has served for a while, or at all."""

    deaths: int = 0
    """Deaths in a row without having been healthy in between."""

    def died(self, served_seconds: float) -> float:
        """Take note of a death; returns the seconds to wait before the next start.

        `served_seconds`: from the child's first being ready to the last sign that its main loop ran.
        How long it took to load does not count, nor how long it hung.
        """
        if served_seconds >= HEALTHY_SECONDS:
            self.deaths = 0
            return 0.0
        self.deaths += 1
        # Bounded exponent: a float overflows after a thousand deaths.
        return min(FIRST_DELAY_SECONDS * 2.0 ** min(self.deaths - 1, 32), MAX_DELAY_SECONDS)

    @property
    def looping_at_start(self) -> bool:
        return self.deaths >= DEATHS_AT_START
