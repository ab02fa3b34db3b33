"""The memory of a pool is there when it was promised, and leaves nothing behind."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from hicache.errors import HostPoolError
from hicache.pool.segment import create_segment, reserve_segment

PLENTY = 1 << 40
MIB = 1 << 20


@pytest.fixture
def segment():
    fd = create_segment("test-segment")
    yield fd
    os.close(fd)


def test_all_of_it_is_reserved_at_once(segment):
    reserve_segment(segment, 3 * MIB, PLENTY)
    found = os.fstat(segment)
    assert found.st_size == 3 * MIB
    assert found.st_blocks * 512 >= 3 * MIB


def test_it_has_no_name_and_is_not_inherited_unless_told(segment):
    assert not any("test-segment" in path.name for path in Path("/dev/shm").iterdir())
    assert not os.get_inheritable(segment)


def test_more_than_is_available_is_refused_with_both_sizes(segment):
    with pytest.raises(HostPoolError, match=r"needs 2\.00 GiB .* 1\.50 GiB are available") as error:
        reserve_segment(segment, 2 << 30, 3 << 29)
    assert "--hicache-size-gb" in str(error.value)
    assert os.fstat(segment).st_blocks == 0


def test_what_the_segment_has_already_need_not_be_available(segment):
    reserve_segment(segment, 2 * MIB, PLENTY)
    os.pwrite(segment, b"content", MIB)
    reserve_segment(segment, 2 * MIB, 0)
    assert os.pread(segment, 7, MIB) == b"content"


def test_another_size_gives_memory_back(segment):
    reserve_segment(segment, 4 * MIB, PLENTY)
    reserve_segment(segment, MIB, 0)
    found = os.fstat(segment)
    assert (found.st_size, found.st_blocks * 512) == (MIB, MIB)


def test_the_limit_on_file_sizes_is_named(segment):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(HostPoolError, match="ulimit -f"):
            reserve_segment(segment, 2 * MIB, PLENTY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_memory_that_the_system_does_not_give_is_an_error_now_and_not_later(segment, monkeypatch):
    given = []
    allocate = os.posix_fallocate

    def full(fd: int, start: int, size: int) -> None:
        given.append((start, size))
        allocate(fd, start, 4096)  # some of it, so that there is something to give back
        if len(given) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(HostPoolError, match=r"needs 4\.00 GiB .* no more \(No space left"):
        reserve_segment(segment, 4 << 30, PLENTY)
    found = os.fstat(segment)
    assert (len(given), found.st_size, found.st_blocks) == (3, 0, 0)
