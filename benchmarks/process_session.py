"""Who still lives of a session of processes, that is, of an instance and all that it has started."""

import contextlib
import os
from pathlib import Path

import psutil


def session_members(leader: int) -> dict[int, str]:
    """Living processes of the session of `leader`, with their command lines.

    A killed process is a zombie as soon as its first thread has ended, even if others still live; then its
    ports and files live too, and it counts, with "" for its command line.
    """
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) != leader:
                continue
            try:
                found[process.pid] = " ".join(process.cmdline())
            except psutil.ZombieProcess:
                if len(list(Path(f"/proc/{process.pid}/task").iterdir())) > 1:
                    found[process.pid] = ""
    return found
