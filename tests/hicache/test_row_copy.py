"""Rows go where they should, and nowhere else."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hicache.copies.row_copy import HostRowCopier
from hicache.copies.rows import HostRows

ROWS = 12


@given(
    st.permutations(range(ROWS)),
    st.permutations(range(ROWS)),
    st.integers(0, ROWS),
    st.sampled_from([8, 24]),
)
def test_stores_and_loads_copy_the_pairs_alone(device, host, count, device_bytes):
    """Also where a device row is longer than its host row, as of a state."""
    rng = np.random.default_rng(0)
    device_pool = rng.integers(0, 256, (ROWS, device_bytes), np.uint8)
    host_pool = rng.integers(0, 256, (ROWS, 8), np.uint8)
    copier = HostRowCopier(HostRows.of(device_pool[:, :8]), HostRows.of(host_pool))
    device_rows, host_rows = np.array(device[:count], np.int32), np.array(host[:count], np.int32)

    wanted = host_pool.copy()
    wanted[host_rows] = device_pool[device_rows, :8]
    copy = copier.store(device_rows, host_rows)
    assert copy.done() and 0 < copy.seconds() < 60
    np.testing.assert_array_equal(host_pool, wanted)

    host_pool[:] = rng.integers(0, 256, (ROWS, 8), np.uint8)
    wanted = device_pool.copy()
    wanted[device_rows, :8] = host_pool[host_rows]
    copy = copier.load(device_rows, host_rows)
    assert copy.done() and 0 < copy.seconds() < 60
    np.testing.assert_array_equal(device_pool, wanted)


def test_a_handoff_copies_between_two_plain_arenas():
    """No host pool on either side: pages go into an arena of bytes, and out of it into another one."""
    rng = np.random.default_rng(1)
    sender, receiver = (HostRows.of(rng.integers(0, 256, (9, 24), np.uint8)) for _ in range(2))
    sent, arena = sender.memory.copy(), np.zeros(5 * 24 + 7, np.uint8)
    places = HostRows.packed(arena, 24, 5)
    assert (places.count, places.row_bytes, places.pitch) == (5, 24, 24)
    rows, sources, targets = (np.array(n, np.int32) for n in ([0, 1, 4], [7, 2, 3], [0, 8, 5]))
    assert HostRowCopier(sender, places).store(sources, rows).done()
    assert HostRowCopier(receiver, places).load(targets, rows).done()
    np.testing.assert_array_equal(receiver.memory[targets], sent[sources])
    np.testing.assert_array_equal(sender.memory, sent)
