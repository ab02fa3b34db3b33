"""Standard streams that neither wait nor fail: what is printed never decides whether a process lives."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable
from typing import Final

from transport.logs import format_warning

_NEWLINE: Final = ord("\n")


class OutputStream(io.TextIOBase):
    """Text whose bytes `deliver` is given at once. For code that asks, it is what `fd` is."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, fd: int, deliver: Callable[[bytes], None]) -> None:
        self._fd = fd
        self._deliver = deliver

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._deliver(text.encode(self.encoding, self.errors))
        return len(text)


class LostLines:
    """Counts the lines that could not be written, and says so before the next that can. Two threads at
    once may miscount."""

    def __init__(self) -> None:
        self._number = 0
        self._is_cut = False
        """Whether the last line that was written has no end yet."""

    def notice(self, reason: str) -> bytes:
        """What to write before the next lines."""
        if not self._number:
            return b""
        notice = format_warning(f"lines of this log lost here: {self._number}; {reason}").encode()
        return b"\n" + notice if self._is_cut else notice

    def count(self, notice: bytes, data: bytes, written: int) -> None:
        """Of `notice` and `data`, one after the other, `written` bytes have been written."""
        taken = max(written - len(notice), 0)
        if written:
            last = data[taken - 1] if taken else notice[written - 1]
            self._is_cut = last != _NEWLINE
        if written >= len(notice):
            self._number = 0
        if rest := data[taken:]:
            self._number += max(rest.count(b"\n"), 1)


class LossyOutput:
    """Writes to a non-blocking descriptor, a child's pipe to the daemon, what that takes at once."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lost = LostLines()

    def write(self, data: bytes) -> None:
        notice = self._lost.notice("the daemon did not take them")
        written = 0
        with contextlib.suppress(OSError):
            written = os.write(self._fd, notice + data)
        self._lost.count(notice, data, written)


def use_lossy_output() -> None:
    """Let the standard streams of this process print without waiting."""
    sys.stdout = OutputStream(1, LossyOutput(1).write)
    sys.stderr = OutputStream(2, LossyOutput(2).write)
