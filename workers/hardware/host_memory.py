"""How much memory can still be had on this machine."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

CGROUPS: Final = Path("/sys/fs/cgroup")
OWN_CGROUPS: Final = Path("/proc/self/cgroup")


def available_host_memory() -> int:
    """Bytes that can be allocated without swapping.

    A limit on this process (`ulimit -v`) or on its cgroups may lower the machine's figure.
    """
    return min([psutil.virtual_memory().available, *_left_in_address_space(), *_left_in_cgroups()])


def _left_in_address_space() -> Iterator[int]:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        yield max(limit - psutil.Process().memory_info().vms, 0)


def _left_in_cgroups() -> Iterator[int]:
    """Bytes left under each limit on this process: those of its own cgroup and of the parents."""
    for folder, limit_name, usage_name in _memory_cgroups():
        for place in (folder, *folder.parents):
            if not place.is_relative_to(CGROUPS):
                break
            limit, used = _number(place / limit_name), _number(place / usage_name)
            if limit is not None and used is not None:
                yield max(limit - used + _file_cache(place), 0)


def _memory_cgroups() -> list[tuple[Path, str, str]]:
    """Our folders in the unified and the old hierarchy, with the file names of limit and usage."""
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found.append((CGROUPS / path.lstrip("/"), "memory.max", "memory.current"))
        elif "memory" in controllers.split(","):
            folder = CGROUPS / "memory" / path.lstrip("/")
            found.append((folder, "memory.limit_in_bytes", "memory.usage_in_bytes"))
    return found


def _number(path: Path) -> int | None:
    """None if there is no such file or no limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _file_cache(folder: Path) -> int:
    """Bytes that count as used but are given back when needed."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split(" ", 1) for line in lines if " " in line)
    return sum(int(values.get(name, 0)) for name in ("active_file", "inactive_file"))
