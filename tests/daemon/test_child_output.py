"""What children print comes in whole lines, whatever they print with, and holds nobody up."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from daemon.supervision.child_output import ChildOutput
from tests.support.waiting import eventually

SECONDS = 30.0
CRASH = "import faulthandler; faulthandler.enable(); faulthandler._sigsegv()"

CHATTY = """
import contextlib, os
for _ in range(40):
    with contextlib.suppress(BlockingIOError):
        os.write(2, b"x" * 100_000)
"""


class Printed:
    """Everything that was passed on."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    @property
    def all(self) -> bytes:
        return b"".join(self.pieces)


@pytest.fixture
def printed() -> Printed:
    return Printed()


@pytest.fixture
def output(printed):
    with ChildOutput(printed.pieces.append) as output:
        yield output


def test_lines_of_two_children_do_not_cut_each_other(output, printed):
    def write(fd: int, letter: bytes) -> None:
        for _ in range(500):
            os.write(fd, letter * 50)
            os.write(fd, letter * 49 + b"\n")

    with output.pipe() as first, output.pipe() as second:
        threads = [
            threading.Thread(target=write, args=args) for args in ((first, b"a"), (second, b"b"))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
    eventually(lambda: len(printed.all) == 100_000, SECONDS)
    assert {len(set(line)) for line in printed.all.splitlines()} == {1}


def test_a_line_without_an_end_is_passed_on(output, printed):
    with output.pipe() as fd:
        os.write(fd, b"10 %\r20 %")
        eventually(lambda: printed.all == b"10 %\r20 %", SECONDS)


def test_the_last_words_of_a_child_end_their_line(output, printed):
    with output.pipe() as fd:
        os.write(fd, b"it is over")
    eventually(lambda: printed.all == b"it is over\n", SECONDS)


def test_a_crash_of_the_interpreter_is_passed_on(output, printed):
    with output.pipe() as fd:
        child = subprocess.Popen([sys.executable, "-c", CRASH], stdout=fd, stderr=fd)
    assert child.wait(SECONDS) < 0
    output.read_all()
    assert b"Fatal Python error: Segmentation fault" in printed.all


def test_a_child_that_prints_while_nobody_reads_does_not_wait(printed):
    output = ChildOutput(printed.pieces.append)  # its thread does not run
    with output.pipe() as fd:
        child = subprocess.Popen([sys.executable, "-c", CHATTY], stdout=fd, stderr=fd)
        assert child.wait(SECONDS) == 0
    with output:
        pass
    assert set(printed.all) <= set(b"x\n")


def test_the_end_passes_on_what_is_there(printed):
    with ChildOutput(printed.pieces.append) as output, output.pipe() as fd:
        os.write(fd, b"last\n")
    assert printed.all == b"last\n"
