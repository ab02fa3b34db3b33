"""The memory of a host pool: an anonymous file that its holders share and that dies with them.

The daemon makes it with memfd_create and keeps the descriptor, workers inherit it. So the content
outlives a worker that is killed, and nothing has a name that could stay behind: the memory goes back
when the last process that holds it ends, however it ends.
"""

from __future__ import annotations

import os
import resource
from typing import Final

from hicache.errors import HostPoolError
from transport.wording import GIB

_RESERVE_STEP: Final = GIB
"""A signal undoes one reserving call, so none may take long."""
_BLOCK: Final = 512
"""Unit of `st_blocks`."""


def create_segment(name: str) -> int:
    """Make an empty segment and return its descriptor, which children inherit only when told to.

    `name` shows in /proc/PID/maps and need not be unique.

    Raises:
        HostPoolError: the operating system refuses.
    """
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC)
    except OSError as error:
        raise HostPoolError(
            f"No shared memory can be made for the host prefix cache ({error.strerror}): raise the "
            "limit on open files (ulimit -n), or turn the cache off with --hicache-size-gb 0."
        ) from error


def reserve_segment(fd: int, num_bytes: int, available_bytes: int) -> None:
    """Give the segment `num_bytes` bytes that exist now, so that touching one cannot fail later.

    Content that fits stays. A segment that already has its memory costs nothing.

    Args:
        fd: from `create_segment`.
        num_bytes: wanted size.
        available_bytes: memory that can be had now, under this machine's and the cgroups' limits.

    Raises:
        HostPoolError: there is not that much; the segment is empty then.
    """
    found = os.fstat(fd)
    if found.st_size == num_bytes and found.st_blocks * _BLOCK >= num_bytes:
        return
    check_segment(fd, num_bytes, available_bytes)
    try:
        if found.st_size > num_bytes:
            os.ftruncate(fd, num_bytes)
        for start in range(0, num_bytes, _RESERVE_STEP):
            os.posix_fallocate(fd, start, min(_RESERVE_STEP, num_bytes - start))
    except OSError as error:
        os.ftruncate(fd, 0)
        raise _too_large(
            num_bytes, f"the operating system gives no more ({error.strerror})"
        ) from error


def check_segment(fd: int, num_bytes: int, available_bytes: int) -> None:
    wanted = num_bytes - min(os.fstat(fd).st_blocks * _BLOCK, num_bytes)
    if wanted > available_bytes:
        raise _too_large(num_bytes, f"{available_bytes / GIB:.2f} GiB are available")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and num_bytes > limit:
        raise _too_large(num_bytes, f"the limit on file sizes (ulimit -f) is {limit / GIB:.2f} GiB")


def _too_large(num_bytes: int, found: str) -> HostPoolError:
    return HostPoolError(
        f"The host prefix cache needs {num_bytes / GIB:.2f} GiB of memory a rank, but {found}: make "
        "room, or lower --hicache-size-gb or --hicache-state-slots."
    )
