"""A child reads its settings, obeys SIGTERM alone, and never outlives its parent."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from transport.child import EXIT_ORPHANED, ProcessSettings
from transport.ids import ProcessName

ROOT = Path(__file__).parents[2]
SECONDS = 15.0

CHILD = """
import sys
import msgspec
from transport.child import ProcessSettings, enter_process

class Settings(msgspec.Struct, frozen=True):
    process: ProcessSettings
    word: str

settings, stop = enter_process(Settings)
print("ready", settings.word, flush=True)
sys.exit(0 if stop.wait(30) else 3)
"""

PARENT = """
import os, subprocess, sys
fd = int(sys.argv[2])
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=fd, stdout=sys.stdout)
os.close(fd)
print(child.pid, flush=True)
child.wait()
"""


def settings_line(parent: int) -> bytes:
    process = ProcessSettings(ProcessName("worker/0"), "worker", "test", "/tmp", parent, "hash")
    return msgspec.json.encode({"process": process, "word": "hello"}) + b"\n"


@pytest.fixture
def child():
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    yield process
    process.kill()
    process.communicate(timeout=SECONDS)


def tell(process, line: bytes) -> None:
    process.stdin.write(line)
    process.stdin.flush()


def test_it_runs_until_sigterm(child):
    tell(child, settings_line(os.getpid()))
    assert child.stdout.readline() == b"ready hello\n"
    title = " ".join(psutil.Process(child.pid).cmdline()).strip()
    assert title == "deepinfer:worker/0 [test]"
    child.send_signal(signal.SIGINT)  # of a terminal: the daemon's business
    child.send_signal(signal.SIGTERM)
    assert child.wait(SECONDS) == 0


def test_the_end_of_its_input_ends_it(child):
    tell(child, settings_line(os.getpid()))
    assert child.stdout.readline() == b"ready hello\n"
    child.stdin.close()
    assert child.wait(SECONDS) == EXIT_ORPHANED
    child.stdin = None


def test_a_parent_that_is_gone_already_is_noticed(child):
    tell(child, settings_line(os.getpid() + 1))
    assert child.wait(SECONDS) == EXIT_ORPHANED


@pytest.mark.parametrize("line", [b"\n", b"hello\n", b'{"process": {}}\n'])
def test_without_settings_it_says_who_starts_it(child, line):
    tell(child, line)
    assert child.wait(SECONDS) == 1
    assert b"started by the deepinfer daemon" in child.stderr.read()


def test_a_killed_parent_takes_it_along_even_if_somebody_holds_the_pipe():
    read_end, write_end = os.pipe()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD, str(read_end)], cwd=ROOT, stdout=subprocess.PIPE,
        pass_fds=(read_end,),
    )  # fmt: skip
    os.close(read_end)
    try:
        pid = int(parent.stdout.readline())
        pidfd = os.pidfd_open(pid)
        os.write(write_end, settings_line(parent.pid))
        assert parent.stdout.readline() == b"ready hello\n"
        parent.kill()
        parent.wait(SECONDS)
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        assert poller.poll(SECONDS * 1000), "the child has outlived its parent"
        os.close(pidfd)
    finally:
        os.close(write_end)
        parent.kill()
        parent.stdout.close()
