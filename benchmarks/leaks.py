"""What an instance must not keep: requests and memory while idle, anything at all after its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.process_session import session_members
from daemon.inspection.inspection_client import InspectionClient

SHARED_MEMORY = Path("/dev/shm")


def held_when_idle(run_dir: Path, seconds: float) -> dict[str, int]:
    """What processes still hold of requests, after at most `seconds` of waiting; empty: nothing."""
    return _settled(lambda: _held(run_dir), seconds)


def _held(run_dir: Path) -> dict[str, int]:
    with InspectionClient(run_dir, "bench") as client:
        state: dict[str, Any] = msgspec.json.decode(client.ask("state", 5.0))
    found = {f"requests {stage}": n for stage, n in state["status"]["requests"].items()}
    found["requests listed"] = len(state["requests"])
    for row in state["cache"]:
        for key in ("pages_used", "slots_used", "sequences_running", "sequences_waiting"):
            # Unknown means that the rank is not there: it must be, by now.
            found[f"{row['process']} {key}"] = -1 if row[key] is None else row[key]
    for row in state["queues"]:
        found[f"{row['process']} queue {row['queue']}"] = row["depth"]
    return {name: value for name, value in found.items() if value}


def left_after_end(
    session: int, run_dir: Path, pids: set[int], shared_before: set[Path]
) -> dict[str, int]:
    def look() -> dict[str, int]:
        new_segments = set(SHARED_MEMORY.iterdir()) - shared_before
        ours = [s for s in new_segments if any(str(pid) in s.name for pid in pids)]
        found = {
            "processes": len(session_members(session)),
            "files": len(list(run_dir.rglob("*"))) + run_dir.exists(),
            "shared memory segments": len(ours),
        }
        return {name: value for name, value in found.items() if value}

    return _settled(look, 2.0)


def _settled(look: Callable[[], dict[str, int]], seconds: float) -> dict[str, int]:
    deadline = time.monotonic() + seconds
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found
