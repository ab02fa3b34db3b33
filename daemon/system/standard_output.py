"""Standard output and error of a command whose work does not depend on who reads them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from daemon.system.log_file import LogFile
from daemon.system.output_writer import OutputWriter
from transport.output import OutputStream


def open_missing_descriptors() -> None:
    """Let descriptors 0 to 2 exist, where they were closed: else the next files opened get their
    numbers, and what is printed. To be called before any file is opened."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


class StandardOutput:
    """Owner of the threads that write; while it is open, `sys.stdout` and `sys.stderr` lead to them."""

    def __init__(self) -> None:
        self._error = OutputWriter(2)
        # One writer where both are the same, so that lines keep their order.
        self._output = self._error if os.path.sameopenfile(1, 2) else OutputWriter(1)
        self._replaced = (sys.stdout, sys.stderr)

    def __enter__(self) -> Self:
        for writer in {self._output, self._error}:
            writer.start()
        self._replaced = (sys.stdout, sys.stderr)
        sys.stdout = OutputStream(1, self._output.write)
        sys.stderr = OutputStream(2, self._error.write)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        sys.stdout, sys.stderr = self._replaced
        for writer in {self._output, self._error}:
            writer.close()

    def write_log(self, data: bytes) -> None:
        """Lines of the children."""
        self._error.write(data)

    @contextlib.contextmanager
    def bounded(self, path: Path, max_bytes: int) -> Iterator[None]:
        """Within this block, if the log at `path` is what standard error is, it keeps its size."""
        self._error.bound(LogFile.behind(2, path, max_bytes))
        try:
            yield
        finally:
            self._error.bound(None)
