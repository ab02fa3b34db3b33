"""The daemon prints without waiting for who reads it, and keeps its log within a size."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from daemon.system.log_file import LogFile
from daemon.system.output_writer import MAX_QUEUED_BYTES, OutputWriter
from tests.support.waiting import eventually

SECONDS = 30.0
LINE = b"x" * 999 + b"\n"
LOST = re.compile(rb" lines of this log lost here: (\d+); (.*)")


@pytest.fixture
def writer():
    """writer(fd): one that is running; closed at the end."""
    writers: list[OutputWriter] = []

    def start(fd: int) -> OutputWriter:
        writers.append(OutputWriter(fd))
        writers[-1].start()
        return writers[-1]

    yield start
    for one in writers:
        one.close()


@pytest.fixture
def pipe():
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    yield ours, theirs
    os.close(theirs)
    os.close(ours)


def read_some(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 20)
    except BlockingIOError:
        return b""


def test_a_pipe_that_nobody_reads_holds_up_neither_work_nor_end(pipe, writer):
    ours, theirs = pipe
    output = writer(theirs)
    number = 4 * MAX_QUEUED_BYTES // len(LINE)
    for _ in range(number):
        output.write(LINE)  # waits for nobody, or this test never ends
    output.close()
    assert read_some(ours).startswith(LINE)


def test_what_a_late_reader_missed_is_counted_at_its_place(pipe, writer):
    ours, theirs = pipe
    output = writer(theirs)
    number = 4 * MAX_QUEUED_BYTES // len(LINE)
    for _ in range(number):
        output.write(LINE)
    received = bytearray()

    def has_all_that_is_queued() -> bool:
        received.extend(read_some(ours))
        return output.is_idle

    eventually(has_all_that_is_queued, SECONDS, "the queue is empty")
    output.write(b"last\n")
    eventually(lambda: received.extend(read_some(ours)) or received.endswith(b"last\n"), SECONDS)
    lost = LOST.findall(received)
    assert received.count(LINE) + sum(int(lines) for lines, _ in lost) == number
    assert {reason for _, reason in lost} == {b"they came faster than they could be written"}


def test_nothing_is_no_end(pipe, writer):
    """A spinner that draws nothing writes an empty string."""
    ours, theirs = pipe
    output = writer(theirs)
    output.write(b"")
    eventually(lambda: output.is_idle, SECONDS)
    output.write(LINE)
    output.close()
    assert read_some(ours) == LINE


def test_a_full_device_costs_lines_and_nothing_else(writer):
    with open("/dev/full", "wb") as full:
        output = writer(full.fileno())
        output.write(LINE)
        eventually(lambda: output.is_idle, SECONDS)
        output.write(LINE)
        output.close()


def test_lines_that_could_not_be_written_are_told_of_once_they_can(tmp_path, writer):
    with (tmp_path / "log").open("ab") as log, open("/dev/full", "wb") as full:
        fd = os.dup(full.fileno())
        output = writer(fd)
        for _ in range(3):
            output.write(LINE)
            eventually(lambda: output.is_idle, SECONDS)
        os.dup2(log.fileno(), fd)  # there is space again
        output.write(b"again\n")
        output.write(b"and again\n")
        output.close()
        os.close(fd)
    told, *rest = (tmp_path / "log").read_bytes().splitlines()
    assert LOST.search(told).groups() == (
        b"3", b"they could not be written (No space left on device)",
    )  # fmt: skip
    assert rest == [b"again", b"and again"]


def test_a_reader_who_has_left_is_no_error(writer):
    ours, theirs = os.pipe()
    os.close(ours)
    output = writer(theirs)
    output.write(LINE)
    output.close()
    os.close(theirs)


# ---- the log in the run directory --------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path):
    """The path of a log, and `write(data)` into it within 10,000 bytes."""
    path = tmp_path / "deepinfer.log"
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    file = LogFile.behind(fd, path, 10_000)

    def write(data: bytes) -> None:
        file.make_room(len(data))
        os.write(fd, data)

    yield path, write
    os.close(fd)


def size_of(folder: Path) -> int:
    return sum(entry.stat().st_size for entry in folder.iterdir())


def test_a_log_keeps_its_size_and_its_newest_lines(log):
    path, write = log
    lines = [b"%06d\n" % number for number in range(10_000)]
    for line in lines:
        write(line)
        assert size_of(path.parent) <= 10_000
    kept = path.with_name("deepinfer.log.1").read_bytes() + path.read_bytes()
    assert len(kept) > 5_000
    assert b"".join(lines).endswith(kept)


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.rename(f"{path}.mine")])
def test_a_log_that_was_taken_away_is_made_anew(log, harm):
    path, write = log
    write(b"before\n")
    harm(path)
    write(b"after\n")
    assert path.read_bytes() == b"after\n"


def test_a_log_that_was_emptied_goes_on(log):
    path, write = log
    write(b"before\n")
    os.truncate(path, 0)
    write(b"after\n")
    assert path.read_bytes() == b"after\n"


def test_a_log_whose_directory_is_gone_ends_nothing(log):
    path, write = log
    path.unlink()
    path.parent.rmdir()
    write(b"into the void\n")
    path.parent.mkdir()


def test_another_file_is_left_as_it_is(tmp_path):
    (tmp_path / "deepinfer.log").touch()
    with (tmp_path / "mine").open("ab") as mine:
        assert LogFile.behind(mine.fileno(), tmp_path / "deepinfer.log", 10) is None
