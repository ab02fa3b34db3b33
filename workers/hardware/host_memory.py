"""How much memory can still be had on this machine, and whether the kernel has killed for it."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import psutil

CGROUPS: Final = Path("/sys/fs/cgroup")
OWN_CGROUPS: Final = Path("/proc/self/cgroup")
VMSTAT: Final = Path("/proc/vmstat")


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
    for place, names in _memory_cgroups():
        limit, used = _number(place / names.limit), _number(place / names.usage)
        if limit is not None and used is not None:
            yield max(limit - used + _file_cache(place), 0)


class OomKills(NamedTuple):
    """How many processes the kernel has ever killed for lack of memory, and which file says so."""

    total: int
    source: Path


def oom_kills() -> OomKills:
    """Those of the nearest cgroup that counts them; else those of the whole machine."""
    places = [place / names.events for place, names in _memory_cgroups()]
    for source in (*places, VMSTAT):
        count = _counted(source, "oom_kill")
        if count is not None:
            return OomKills(count, source)
    return OomKills(0, VMSTAT)


class _Names(NamedTuple):
    """Files of a memory cgroup."""

    limit: str
    usage: str
    events: str


_UNIFIED: Final = _Names("memory.max", "memory.current", "memory.events")
_OLD: Final = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control")


def _memory_cgroups() -> Iterator[tuple[Path, _Names]]:
    """Our own folders in the unified and the old hierarchy, each followed by its parents."""
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        names, root = (_OLD, CGROUPS / "memory") if controllers else (_UNIFIED, CGROUPS)
        folder = root / path.lstrip("/")
        for place in (folder, *folder.parents):
            if not place.is_relative_to(CGROUPS):
                break
            yield place, names


def _number(path: Path) -> int | None:
    """None if there is no such file or no limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _file_cache(folder: Path) -> int:
    """Bytes that count as used but are given back when needed."""
    names = ("active_file", "inactive_file")
    return sum(_counted(folder / "memory.stat", name) or 0 for name in names)


def _counted(path: Path, name: str) -> int | None:
    """A number in a file of lines `name number`; None if it is not there."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    values = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(values[name]) if name in values else None
