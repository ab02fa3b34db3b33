"""SIGTERM, SIGINT and SIGHUP as something that a poller can wait for."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType


class StopRequested(BaseException):
    """Somebody asked to stop during a piece of work that cannot watch a descriptor."""


class StopSignals:
    """Counts the signals that ask the daemon to stop. Install on the main thread.

    SIGHUP stays ignored where it was at the start (nohup). Else it asks to stop, or if
    `hangup_reloads` to reload, except in a terminal, where it says that the terminal is gone.
    """

    def __init__(self, hangup_reloads: bool = False) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.count = 0
        """How often somebody has asked."""
        self._taken = 0
        self._hangup_reloads = hangup_reloads and not _has_terminal()
        self._hung_up = False
        self._interrupts = False
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self._previous = {number: signal.signal(number, self._handle) for number in numbers}

    def take(self) -> bool:
        """Whether somebody has asked to stop since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        taken, self._taken = self._taken, self.count
        return self._taken > taken

    def take_hangup(self) -> bool:
        """Whether somebody has asked to reload since the last call."""
        hung_up, self._hung_up = self._hung_up, False
        return hung_up

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

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP and self._hangup_reloads:
            self._hung_up = True
            os.eventfd_write(self.fd, 1)
            return
        self.count += 1
        os.eventfd_write(self.fd, 1)
        if self._interrupts:
            raise StopRequested


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
