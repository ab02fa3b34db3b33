"""A pool describes itself: what one process left, the next serves, and only that."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pytest

from hicache.errors import HostPoolError
from hicache.pool.headers import HEADER_DTYPE, PAGE_KIND, HeaderTable
from hicache.pool.host_pool import HostPool, PoolGeometry
from hicache.pool.segment import create_segment

PLENTY = 1 << 40
GEOMETRY = PoolGeometry("model", page_bytes=5000, num_pages=7, state_bytes=300, num_states=3)


@pytest.fixture
def segment():
    fd = create_segment("test")
    yield fd
    os.close(fd)


@contextlib.contextmanager
def attached(fd: int, geometry: PoolGeometry = GEOMETRY):
    pool = HostPool(fd, geometry, PLENTY)
    try:
        yield pool
    finally:
        pool.close()


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def publish_one(pool: HostPool, slot: int, key: bytes, parent: bytes = bytes(16), depth: int = 0):
    pool.page_headers.begin_write(slots(slot))
    pool.pages.memory[slot] = key[0]
    pool.page_headers.publish(slots(slot), [key], [parent], np.array([depth], np.uint32), 77)


def test_budget_is_for_pages_alone():
    """32 GiB of pages of 114 048 bytes, and 4096 states beside them."""
    geometry = PoolGeometry.from_budget("m", 32 << 30, 114_048, 1_415_040, 4096)
    assert (geometry.num_pages, geometry.num_states) == (301_274, 4096)
    assert geometry.total_bytes - (32 << 30) - 4096 * 1_415_040 < 32 << 20
    assert PoolGeometry.from_budget("m", 1 << 20, 1000, 0, 4096).num_states == 0


def test_a_budget_below_one_page_is_refused():
    with pytest.raises(HostPoolError, match="--hicache-size-gb"):
        PoolGeometry.from_budget("m", 999, 1000, 0, 0)
    with pytest.raises(HostPoolError, match="--hicache-state-slots"):
        PoolGeometry.from_budget("m", 5000, 1000, 10, 0)


def test_rows_are_packed_aligned_at_their_start_and_apart_from_all_else(segment):
    with attached(segment) as pool:
        base = pool.memory.ctypes.data
        assert (pool.pages.memory.ctypes.data - base) % 4096 == 0
        assert (pool.states.memory.ctypes.data - base) % 4096 == 0
        assert pool.pages.memory[1].ctypes.data - pool.pages.memory[0].ctypes.data == 5000
        pool.pages.memory[:] = 255
        assert not pool.states.memory.any()
        pool.states.memory[:] = 255
        assert not pool.page_headers.valid_headers() and not pool.state_headers.valid_headers()
    with attached(segment) as pool:
        assert pool.recovered and pool.pages.memory.all() and pool.states.memory.all()


def test_headers_and_rows_outlive_the_mapping(segment):
    with attached(segment) as pool:
        assert not pool.recovered
        publish_one(pool, 4, b"a" * 16)
        publish_one(pool, 2, b"b" * 16, parent=b"a" * 16, depth=1)
    with attached(segment) as pool:
        assert pool.recovered
        first, second = pool.page_headers.valid_headers()
        assert first == (4, b"a" * 16, bytes(16), 0, 77)
        assert second == (2, b"b" * 16, b"a" * 16, 1, 77)
        assert (pool.pages.memory[4] == ord("a")).all()


def test_a_slot_is_invalid_from_the_moment_its_row_may_change(segment):
    with attached(segment) as pool:
        publish_one(pool, 1, b"a" * 16)
        pool.page_headers.begin_write(slots(1))
    with attached(segment) as pool:
        assert pool.page_headers.valid_headers() == []


@pytest.mark.parametrize(
    "other",
    [
        PoolGeometry("other model", 5000, 7, 300, 3),
        PoolGeometry("model", 5001, 7, 300, 3),
        PoolGeometry("model", 5000, 8, 300, 3),
        PoolGeometry("model", 5000, 7, 301, 3),
        PoolGeometry("model", 5000, 7, 300, 2),
        PoolGeometry("model", 5000, 7),
    ],
)
def test_a_pool_made_for_anything_else_is_wiped(segment, other):
    with attached(segment) as pool:
        publish_one(pool, 1, b"a" * 16)
        pool.states.memory[:] = 3
    with attached(segment, other) as pool:
        assert not pool.recovered
        assert not pool.page_headers.valid_headers() and not pool.state_headers.valid_headers()
    with attached(segment) as pool:
        assert not pool.recovered, "nor is it served when the first model comes back"
        assert not pool.page_headers.valid_headers()


@pytest.mark.parametrize("byte", range(64))
def test_a_changed_header_is_not_believed(segment, byte):
    """Any byte of it: but for the time of the last use, which harms nobody."""
    with attached(segment) as pool:
        publish_one(pool, 1, b"a" * 16)
        pool.memory[4096 + 64 + byte] ^= 1
        damaged = pool.page_headers.damaged().tolist()
        valid = [found.row for found in pool.page_headers.valid_headers()]
    last_use = range(48, 56)
    status = range(32, 36)
    if byte in status:
        assert valid == []
    else:
        assert damaged == ([] if byte in last_use else [1])


class Watched(np.ndarray):
    """Tells of each write, as a process that is killed right after it would leave the table."""

    written: ClassVar[list[Callable[[], None]]] = []

    def __setitem__(self, key, value) -> None:
        super().__setitem__(key, value)
        for tell in self.written:
            tell()


def test_whatever_word_was_written_last_a_valid_header_is_whole(monkeypatch):
    rows, keys = slots(2, 0), [b"a" * 16, b"b" * 16]
    memory = np.zeros(3, HEADER_DTYPE)
    seen = HeaderTable(memory, PAGE_KIND)
    whole = [(2, keys[0], bytes(16), 0, 77), (0, keys[1], keys[0], 1, 77)]
    states = []

    def look() -> None:
        assert seen.damaged().tolist() == []
        states.append(seen.valid_headers())

    monkeypatch.setattr(Watched, "written", [look])
    table = HeaderTable(memory.view(Watched), PAGE_KIND)
    table.begin_write(rows)
    table.publish(rows, keys, [bytes(16), keys[0]], np.array([0, 1], np.uint32), 77)
    assert len(states) > 6
    assert all(state == [] for state in states[:-1])
    assert states[-1] == whole
    states.clear()
    table.begin_write(rows)
    assert states and not any(states), "its first word says that the row changes"


def test_two_processes_cannot_have_it_at_once(segment):
    program = (
        "import sys\n"
        "from hicache.pool.host_pool import HostPool, PoolGeometry\n"
        "from hicache.errors import HostPoolError\n"
        "try: HostPool(int(sys.argv[1]), PoolGeometry('model', 5000, 7, 300, 3), 1 << 40)\n"
        "except HostPoolError as error: sys.exit(f'refused: {error}')\n"
    )

    def other_process() -> str:
        command = [sys.executable, "-c", program, str(segment)]
        done = subprocess.run(
            command, pass_fds=[segment], capture_output=True, text=True, check=False
        )
        return done.stderr

    with attached(segment):
        assert "refused: The host pool is still mapped" in other_process()
    assert other_process() == ""
    with attached(segment) as pool:
        assert pool.recovered


def test_closing_while_somebody_reads_is_an_error(segment):
    pool = HostPool(segment, GEOMETRY, PLENTY)
    rows = pool.pages.memory
    with pytest.raises(BufferError):
        pool.close()
    assert rows.shape == (7, 5000)
    del rows
    pool.close()


def test_a_descriptor_that_was_not_inherited_is_named(segment):
    with pytest.raises(HostPoolError, match="descriptor 987"):
        HostPool(987, GEOMETRY, PLENTY)


def test_a_pool_that_does_not_fit_leaves_nothing_locked(segment):
    with pytest.raises(HostPoolError, match="are available"):
        HostPool(segment, GEOMETRY, 100)
    with attached(segment) as pool:
        assert not pool.recovered
