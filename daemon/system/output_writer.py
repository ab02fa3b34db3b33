"""What the daemon and its children print, written by a thread that everybody else never waits for."""

from __future__ import annotations

import os
import select
import stat
import threading
from collections import deque
from typing import Final

from daemon.system.log_file import LogFile
from transport.output import LostLines

MAX_QUEUED_BYTES: Final = 1 << 20
"""What is kept for a reader who does not read; more is lost."""
POLL_MS: Final = 500
CLOSE_SECONDS: Final = 1.0
"""How long the end of a process waits for a reader who does not read."""


class OutputWriter:
    """Owner of the thread, which writes to one descriptor and may be held up by it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        # More at once could block although the descriptor is writable: it may be a pipe or a terminal.
        is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        self._piece_bytes = MAX_QUEUED_BYTES if is_file else select.PIPE_BUF
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._changed = threading.Condition()  # reentrant: signal handlers may print
        self._not_queued = LostLines()
        self._not_written = LostLines()
        self._reason = ""
        self._is_writing = self._is_closing = False
        self._is_given_up = False
        self._log_file: LogFile | None = None
        self._file_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def write(self, data: bytes) -> None:
        """Take lines, or count them as lost. Never waits; callable from any thread."""
        if not data:  # an empty piece in the queue would end the thread
            return
        with self._changed:
            notice = self._not_queued.notice("they came faster than they could be written")
            size = len(notice) + len(data)
            fits = self._queued_bytes + size <= MAX_QUEUED_BYTES
            self._not_queued.count(notice, data, size if fits else 0)
            if fits:
                self._queue.append(notice + data)
                self._queued_bytes += size
                self._changed.notify()

    @property
    def is_idle(self) -> bool:
        """Whether all that was taken has been written, or is lost."""
        with self._changed:
            return not self._queue and not self._is_writing

    def bound(self, log_file: LogFile | None) -> None:
        """From here on, what is written to is this file. None: its directory is no longer ours."""
        with self._file_lock:
            self._log_file = log_file

    def close(self) -> None:
        """Write what is queued, as far as somebody takes it within a second. Idempotent."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(CLOSE_SECONDS)
        self._is_given_up = True

    def _run(self) -> None:
        while data := self._take():
            with self._file_lock:
                if self._log_file is not None:
                    self._log_file.make_room(len(data))
            notice = self._not_written.notice(self._reason)
            self._not_written.count(notice, data, self._write_now(notice + data))

    def _take(self) -> bytes:
        """All that is queued, once there is something; nothing: the end."""
        with self._changed:
            self._is_writing = False
            while not self._queue and not self._is_closing:
                self._changed.wait(POLL_MS / 1000)
            data = b"".join(self._queue)
            self._queue.clear()
            self._queued_bytes = 0
            self._is_writing = True
            return data

    def _write_now(self, data: bytes) -> int:
        """The number of bytes written before the first error."""
        poller = select.poll()
        poller.register(self._fd, select.POLLOUT)
        view = memoryview(data)
        written = 0
        while written < len(data) and not self._is_given_up:
            if not poller.poll(POLL_MS):
                continue
            try:
                written += os.write(self._fd, view[written : written + self._piece_bytes])
            except BlockingIOError:
                continue  # another process writes to the same pipe, and was faster
            except OSError as error:
                self._reason = f"they could not be written ({error.strerror})"
                break
        return written
