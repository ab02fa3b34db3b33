"""SIGTERM and SIGINT as something that a poller can wait for."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType


class StopRequested(BaseException):
    """Somebody asked to stop during a piece of work that cannot watch a descriptor."""


class StopSignals:
    """Counts the signals that ask the daemon to stop. Install on the main thread."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.count = 0
        """How often somebody has asked."""
        self._interrupts = False
        self._previous = {
            number: signal.signal(number, self._handle)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        }

    def take(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            return os.eventfd_read(self.fd) > 0
        return False

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Within this block a signal ends the work at once.

        Raises:
            StopRequested: somebody asks, or has asked before.
        """
        self._interrupts = True
        try:
            if self.count:
                raise StopRequested
            yield
        finally:
            self._interrupts = False

    def close(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self.fd)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1
        os.eventfd_write(self.fd, 1)
        if self._interrupts:
            raise StopRequested
