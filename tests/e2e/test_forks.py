"""Processes of test instances that begin as forks are to their daemon what those of a user's are."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from pathlib import Path

import pytest

STATUS_LINES = ("SigIgn", "SigBlk", "Umask", "NoNewPrivs")


@pytest.fixture
def forked_server(serve):
    with serve(engine="fake", fake_step_ms=20, max_waiting=2, max_num_seqs=2) as server:
        yield server.ready()


def test_forked_processes_are_as_those_of_a_user(fake_server, forked_server):
    assert traits(forked_server) == traits(fake_server)


def traits(server) -> dict[str, dict[str, object]]:
    """What the kernel knows of each process, without numbers that differ anyway."""
    pids = server.pids()
    first = pids["router"]
    return {
        name: {
            "is a child of the daemon": parent_of(pid) == pids["daemon"],
            "is in the group of the first": os.getpgid(pid) == first,
            "session": os.getsid(pid) == pids["daemon"],
            "title": Path(f"/proc/{pid}/cmdline").read_text().strip("\0").split(" [")[0],
            "directory": str(Path(f"/proc/{pid}/cwd").readlink()),
            "limits": Path(f"/proc/{pid}/limits").read_text(),
            "input": kind(str(Path(f"/proc/{pid}/fd/0").readlink())),
            "shares with the daemon": shared(pid, pids["daemon"]),
            "shares with the frontend": shared(pid, pids["frontend/0"]),
            **{line: status(pid)[line] for line in STATUS_LINES},
        }
        for name, pid in pids.items()
        if name != "daemon"
    }


def parent_of(pid: int) -> int:
    return int(status(pid)["PPid"])


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def shared(pid: int, other: int) -> Counter[str]:
    """The kinds of descriptors that two processes both have, but for the log."""
    if pid == other:
        return Counter()
    return Counter(kind(x) for x in open_files(pid) & open_files(other) if not x.startswith("/"))


def open_files(pid: int) -> set[str]:
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a connection that has just ended
            target = str(entry.readlink())
            if ":[" in target and not target.startswith("anon_inode"):
                found.add(target)
    return found


def kind(target: str) -> str:
    return target.partition(":")[0]
