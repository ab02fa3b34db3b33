"""Who still lives of a session of processes, that is, of an instance and all that it has started."""

import contextlib
import os
from pathlib import Path

import psutil


def session_members(leader: int) -> dict[int, str]:
    """Living processes of the session of `leader`, with their command lines ("" once the first thread has ended)."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) != leader:
                continue
            try:
                found[process.pid] = " ".join(process.cmdline())
            except psutil.ZombieProcess:
                if _threads(process) > 1:
                    found[process.pid] = ""
    return found


def _threads(process: psutil.Process) -> int:
    """A killed process becomes a zombie when its first thread ends; the others still hold its ports and files."""
    return len(list(Path(f"/proc/{process.pid}/task").iterdir()))
