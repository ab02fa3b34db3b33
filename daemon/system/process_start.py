"""When a process was started, on a clock that nobody can set.

With a process id it tells a process from a later one of that id. psutil gives this time of day, which
changes for all processes whenever the machine's clock is set.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")
_START_FIELD: Final = 19
"""`starttime` of /proc/PID/stat, counted behind the process's name."""


def seconds_at_start(pid: int) -> float:
    """Seconds from the machine's boot to the start of the process.

    Raises:
        OSError: there is no such process.
    """
    stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    # The name may hold blanks and parentheses; nothing after it does.
    return int(stat.rpartition(")")[2].split()[_START_FIELD]) / _TICKS_PER_SECOND


def process_age(pid: int) -> float:
    """Seconds since the start of the process, suspends included.

    Raises:
        OSError: there is no such process.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME) - seconds_at_start(pid)


def boot_id() -> str:
    """Names this boot of the machine; "" where the kernel does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
