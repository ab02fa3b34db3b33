"""A process counts as long as one of its threads lives."""

import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.process_session import session_members

SYS_EXIT = {"x86_64": 60, "aarch64": 93}.get(platform.machine())  # ends one thread, not the process

# Its first thread ends; another one goes on until standard input does.
FIRST_THREAD_ENDS = f"""
import ctypes, os, sys, threading
threading.Thread(target=lambda: (print("runs", flush=True), os.read(0, 1), os._exit(0))).start()
ctypes.CDLL(None).syscall(ctypes.c_long({SYS_EXIT}), ctypes.c_long(0))
"""


@pytest.mark.skipif(SYS_EXIT is None, reason="the number of the system call is not known here")
def test_a_process_whose_first_thread_has_ended_still_counts():
    process = subprocess.Popen(
        [sys.executable, "-c", FIRST_THREAD_ENDS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    with process:
        assert process.stdout.readline() == b"runs\n"
        deadline = time.monotonic() + 10
        while _state(process.pid) != "Z":
            assert time.monotonic() < deadline, "its first thread goes on"
        assert list(session_members(process.pid)) == [process.pid]
        process.stdin.close()
        process.wait(10)
        assert session_members(process.pid) == {}


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
