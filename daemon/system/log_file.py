"""The log in the run directory: bounded, and there again if somebody has removed it."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from daemon.system.run_directory import OLDER_LOG_FILE


class LogFile:
    """The log that a descriptor is open for. Used by the one thread that writes to it.

    The file stays the same when it is full, emptied after a copy: whoever reads or writes it goes on.
    """

    def __init__(self, fd: int, path: Path, max_bytes: int) -> None:
        """`max_bytes`: of the log and its older part together."""
        self._fd = fd
        self._path = path
        self._max_bytes = max_bytes // 2

    @classmethod
    def behind(cls, fd: int, path: Path, max_bytes: int) -> LogFile | None:
        """None: the descriptor is open for something else."""
        is_it = _is_open_for(fd, path)
        return cls(fd, path, max_bytes) if is_it else None

    def make_room(self, num_bytes: int) -> None:
        """Before so many are written. What cannot be done is left: the log must not end its process."""
        with contextlib.suppress(OSError):
            if not _is_open_for(self._fd, self._path):
                self._open_anew()
            size = os.fstat(self._fd).st_size
            if size and size + num_bytes > self._max_bytes:
                self._move_to_older()

    def _open_anew(self) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self._path, flags, 0o600)
        if self._fd != 1 and os.path.sameopenfile(1, self._fd):
            os.dup2(fd, 1)
        os.dup2(fd, self._fd)  # standard error: a crash of the interpreter will be in it, too
        os.close(fd)

    def _move_to_older(self) -> None:
        older = self._path.with_name(OLDER_LOG_FILE)
        try:
            shutil.copyfile(self._path, older)
        except OSError:
            older.unlink(missing_ok=True)  # no space for both: the log that goes on matters more
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)


def _is_open_for(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except OSError:
        return False
