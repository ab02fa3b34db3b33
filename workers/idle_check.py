"""Looks a worker's books over in its pauses, so that a leak or a mix-up shows where it happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

PATIENCE: Final = 200
"""A pause must have been so many times as long as the last check took: whoever comes during a check waits for
its end, and a check walks the whole prefix cache, more than a second for hundreds of thousands of pages."""


class IdleCheck:
    """Runs its checks once in each pause that is long enough."""

    def __init__(
        self, checks: Sequence[Callable[[], None]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Each check raises `AssertionError` if something is wrong. `clock` returns seconds."""
        self._checks = checks
        self._clock = clock
        self._cost = 0.0
        self._quiet_since = clock()
        self._is_done = False

    def busy(self) -> None:
        self._quiet_since = self._clock()
        self._is_done = False

    def quiet(self) -> None:
        """Called while nothing arrives.

        Raises:
            AssertionError: a check failed.
        """
        began = self._clock()
        if self._is_done or began - self._quiet_since < PATIENCE * self._cost:
            return
        for check in self._checks:
            check()
        self._is_done = True
        self._cost = self._clock() - began
