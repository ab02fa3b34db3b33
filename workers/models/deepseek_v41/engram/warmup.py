"""Reads the Engram tables once, so that look-ups find their rows in memory.

The tables are mapped from their files, and a row that is not in the page cache yet costs a read of the disk
in the middle of a step. A worker therefore reads them from end to end in the background while it already
serves; of several workers of a host one does it for all.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Final

from workers.hardware.host_memory import available_host_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workers.models.safetensors_header import StoredTensor

_READ_BYTES: Final = 16 * 1024 * 1024
_LOG_SECONDS: Final = 30.0

_log = logging.getLogger(__name__)


class EngramWarmup:
    """A thread that reads tensors into the page cache. The engine that looks rows up makes and closes it."""

    def __init__(self, tensors: Sequence[StoredTensor]) -> None:
        """Begin to read, unless the tensors do not fit into memory, which is logged.

        `tensors` holds the rows and scales of all tables and is not empty.
        """
        self._tensors = tensors
        self._total = sum(tensor.size for tensor in tensors)
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None
        self.complete = False
        """Whether this object has read all of them."""
        available = available_host_memory()
        if self._total > available:
            _log.warning(
                "The Engram tables have %.1f GB, but %.1f GB of memory are free: look-ups will often "
                "wait for the disk.",
                self._total / 1e9,
                available / 1e9,
            )
            return
        self._thread = threading.Thread(target=self._run, name="engram-warmup", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        if self._thread is not None:
            self._thread.join(seconds)
            return not self._thread.is_alive()
        return True

    def close(self) -> None:
        self._cancelled.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            with open(self._tensors[0].file, "rb") as first:
                if _is_ours_to_read(first.fileno()):
                    self._read_all()
        except OSError as error:
            _log.warning("The Engram tables could not be read ahead: %s.", error)

    def _read_all(self) -> None:
        began = logged = time.monotonic()
        done = 0
        for tensor in self._tensors:
            with open(tensor.file, "rb", buffering=0) as file:
                for position in range(0, tensor.size, _READ_BYTES):
                    if self._cancelled.is_set():
                        return
                    length = min(_READ_BYTES, tensor.size - position)
                    if len(os.pread(file.fileno(), length, tensor.offset + position)) < length:
                        raise OSError(f"{tensor.file} became shorter while it was read")
                    done += length
                    if time.monotonic() - logged >= _LOG_SECONDS:
                        logged = time.monotonic()
                        _log.info(
                            "Engram tables: %.1f of %.1f GB read", done / 1e9, self._total / 1e9
                        )
        self.complete = True
        _log.info("Engram tables: %.1f GB read in %.1f s", done / 1e9, time.monotonic() - began)


def _is_ours_to_read(descriptor: int) -> bool:
    """Whether no other process of this host reads them. The claim ends with the descriptor."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # A file system without such locks: reading twice costs little, the second finds it in memory.
        return True
    return True
