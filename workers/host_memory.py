"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path

import psutil


def available_host_memory() -> int:
    """Bytes that this process may still take: free memory, or less where a cgroup limits it."""
    free = int(psutil.virtual_memory().available)
    limit = _read_number(Path("/sys/fs/cgroup/memory.max"))
    used = _read_number(Path("/sys/fs/cgroup/memory.current"))
    if limit is None or used is None:
        return free
    return min(free, max(0, limit - used))


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
