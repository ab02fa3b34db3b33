"""A process that prints neither waits nor fails, and says what got lost."""

from __future__ import annotations

import os
import re

import pytest

from transport import logs
from transport.logs import Seldom
from transport.output import LossyOutput, OutputStream

LOST = re.compile(rb"WARNING .* lines of this log lost here: (\d+); (.*)\n")


@pytest.fixture
def pipe():
    ours, theirs = os.pipe()
    for fd in (ours, theirs):
        os.set_blocking(fd, False)
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def read_all(fd: int) -> bytes:
    pieces = []
    while True:
        try:
            pieces.append(os.read(fd, 1 << 20))
        except BlockingIOError:
            return b"".join(pieces)


def test_a_full_pipe_costs_lines_which_are_counted_and_told_once(pipe):
    ours, theirs = pipe
    output = LossyOutput(theirs)
    line = b"x" * 999 + b"\n"
    for _ in range(200):
        output.write(line)
    taken = read_all(ours).count(line)
    assert 0 < taken < 200
    output.write(b"again\n")
    output.write(b"and again\n")
    told = read_all(ours)
    assert [int(number) for number, _ in LOST.findall(told)] == [200 - taken]
    assert told.endswith(b"\nagain\nand again\n")


def test_a_line_that_is_taken_in_part_does_not_swallow_the_next(pipe):
    ours, theirs = pipe
    output = LossyOutput(theirs)
    output.write(b"x" * (1 << 20) + b"\n")
    assert read_all(ours).strip(b"x") == b""
    output.write(b"next\n")
    number, _ = LOST.search(read_all(ours)).groups()
    assert number == b"1"
    output.write(b"x" * (1 << 20) + b"\n")
    cut = read_all(ours)
    output.write(b"next\n")
    lines = (cut + read_all(ours)).splitlines()
    assert [set(lines[0]), lines[-1]] == [set(b"x"), b"next"]
    assert len(lines) == 3


def test_a_reader_who_has_left_is_no_error():
    ours, theirs = os.pipe()
    os.close(ours)
    LossyOutput(theirs).write(b"nobody hears it\n")
    os.close(theirs)


def test_any_text_can_be_printed():
    printed: list[bytes] = []
    stream = OutputStream(2, printed.append)
    print("é", "\udcff", file=stream, flush=True)
    assert b"".join(printed) == "é \\udcff\n".encode()


def test_what_others_repeat_is_logged_now_and_then_with_its_number(monkeypatch, caplog):
    now = 100.0
    monkeypatch.setattr(logs.time, "monotonic", lambda: now)
    seldom = Seldom()
    for number in range(50):
        seldom.log(logs.logging.getLogger("test"), logs.logging.ERROR, "refused %d", number)
    now += logs.REPEAT_SECONDS
    seldom.log(logs.logging.getLogger("test"), logs.logging.ERROR, "refused %d", 50)
    assert [record.getMessage() for record in caplog.records] == [
        "refused 0",
        "refused 50 (and 49 more like it since the last such line)",
    ]
