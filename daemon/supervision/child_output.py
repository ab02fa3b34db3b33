"""What the children print: taken from their pipes by a thread, and passed on in whole lines.

A child never waits for it, whatever it prints with: its end of the pipe does not block. So a crash of
the interpreter, or of a library, is in the log as well.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Final, Self

PIPE_BYTES: Final = 1 << 20
"""Of each child: some ten thousand lines, should the daemon stand still."""
READ_BYTES: Final = 1 << 16
MAX_LINE_BYTES: Final = 1 << 16
PARTIAL_SECONDS: Final = 0.1
"""How long a line may stay unfinished before it is passed on: a progress bar never ends its own."""
POLL_SECONDS: Final = 0.5
GATHER_SECONDS: Final = 0.01
"""Between two rounds, so that many lines cost one: much less than a pipe holds."""


class _Pipe:
    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.partial = b""
        self.partial_since = 0.0


class ChildOutput:
    """Owner of the reading ends and of the thread. `deliver` gets bytes, on that thread or on the
    caller's of `read_all`; it must not wait."""

    def __init__(self, deliver: Callable[[bytes], None]) -> None:
        self._deliver = deliver
        self._pipes: dict[int, _Pipe] = {}
        self._lock = threading.Lock()
        self._poller = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._wake_fd, select.EPOLLIN)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="child-output", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Pass on what is there; what processes print that still run is lost."""
        self._closing.set()
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        self.read_all()
        for pipe in list(self._pipes.values()):
            self._end(pipe)
        self._poller.close()
        os.close(self._wake_fd)

    @contextlib.contextmanager
    def pipe(self) -> Iterator[int]:
        """The writing end of a pipe for a child that is started within this block.

        Raises:
            OSError: the operating system refuses another pipe.
        """
        ours, theirs = os.pipe()
        for fd in (ours, theirs):
            os.set_blocking(fd, False)
        with contextlib.suppress(OSError):  # the usual size will do
            fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        with self._lock:
            self._pipes[ours] = _Pipe(ours)
            self._poller.register(ours, select.EPOLLIN)
        try:
            yield theirs
        finally:
            os.close(theirs)

    def read_all(self) -> None:
        """Pass on what the children have printed up to now."""
        with self._lock:
            for pipe in list(self._pipes.values()):
                for _ in range(PIPE_BYTES // READ_BYTES):
                    if not self._read(pipe):
                        break

    def _run(self) -> None:
        while not self._closing.is_set():
            events = self._poller.poll(PARTIAL_SECONDS if self._has_partial() else POLL_SECONDS)
            with self._lock:
                for fd, _ in events:
                    if fd in self._pipes:
                        self._read(self._pipes[fd])
                self._pass_on_partial(time.monotonic() - PARTIAL_SECONDS)
            self._closing.wait(GATHER_SECONDS)

    def _has_partial(self) -> bool:
        with self._lock:
            return any(pipe.partial for pipe in self._pipes.values())

    def _read(self, pipe: _Pipe) -> bool:
        """Whether there was something."""
        try:
            data = os.read(pipe.fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._end(pipe)
            return False
        lines, newline, partial = (pipe.partial + data).rpartition(b"\n")
        if lines or newline:
            self._deliver(lines + newline)
            pipe.partial_since = time.monotonic()
        elif not pipe.partial:
            pipe.partial_since = time.monotonic()
        pipe.partial = partial
        if len(partial) > MAX_LINE_BYTES:
            self._pass_on(pipe)
        return True

    def _pass_on_partial(self, before: float) -> None:
        for pipe in self._pipes.values():
            if pipe.partial and pipe.partial_since <= before:
                self._pass_on(pipe)

    def _pass_on(self, pipe: _Pipe) -> None:
        self._deliver(pipe.partial)
        pipe.partial = b""

    def _end(self, pipe: _Pipe) -> None:
        if pipe.partial:
            self._deliver(pipe.partial + b"\n")
        del self._pipes[pipe.fd]
        self._poller.unregister(pipe.fd)
        os.close(pipe.fd)
