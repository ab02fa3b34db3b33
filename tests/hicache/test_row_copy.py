"""Rows go where they should, and nowhere else."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hicache.copies.row_copy import CpuRowCopier

ROWS = 12


@given(
    st.permutations(range(ROWS)),
    st.permutations(range(ROWS)),
    st.integers(0, ROWS),
    st.sampled_from([8, 24]),
)
def test_upload_and_download_copy_the_pairs_alone(device, host, count, device_bytes):
    """Also where a device row is longer than its host row, as of a state."""
    rng = np.random.default_rng(0)
    device_pool = rng.integers(0, 256, (ROWS, device_bytes), np.uint8)
    host_pool = rng.integers(0, 256, (ROWS, 8), np.uint8)
    copier = CpuRowCopier(device_pool, host_pool)
    device_rows, host_rows = np.array(device[:count], np.int32), np.array(host[:count], np.int32)

    wanted = host_pool.copy()
    wanted[host_rows] = device_pool[device_rows, :8]
    copy = copier.download(device_rows, host_rows)
    assert copy.done() and 0 < copy.seconds() < 60
    np.testing.assert_array_equal(host_pool, wanted)

    host_pool[:] = rng.integers(0, 256, (ROWS, 8), np.uint8)
    wanted = device_pool.copy()
    wanted[device_rows, :8] = host_pool[host_rows]
    copy = copier.upload(device_rows, host_rows)
    assert copy.done() and 0 < copy.seconds() < 60
    np.testing.assert_array_equal(device_pool, wanted)
