"""Copies on a real GPU: bytes, order with the steps, and a pool that a memfd holds."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import pytest
import torch

from hicache.copies.cuda import open as cuda_open
from hicache.copies.cuda.method import CopyMethodMissing
from hicache.copies.cuda.open import open_gpu_row_copier
from hicache.copies.cuda.page_lock import PageLock
from hicache.copies.cuda.row_copy import GpuRowCopier
from hicache.copies.cuda.rows import tensor_rows
from hicache.pool.host_pool import HostPool, PoolGeometry
from hicache.pool.segment import create_segment

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

PLENTY = 1 << 40
SLOW_CYCLES = 200_000_000  # about a tenth of a second
CHOICES = ["auto", "batch", "kernel", "neither"]
"""neither: `auto` on a machine that has neither."""


@dataclass
class Pools:
    """A page-locked host pool and a pool on the GPU, both full of random bytes."""

    host: np.ndarray
    device: torch.Tensor
    copier: GpuRowCopier

    def device_bytes(self) -> np.ndarray:
        return self.device.cpu().numpy()


def missing(*_arguments: object) -> NoReturn:
    raise CopyMethodMissing("it is taken away")


@pytest.fixture
def make_pools(monkeypatch) -> Iterator[Callable[..., Pools]]:
    with contextlib.ExitStack() as stack:

        def make(row_bytes: int, rows: int, choice: str) -> Pools:
            if choice == "neither":
                monkeypatch.setattr(cuda_open, "find_batch_call", missing)
                monkeypatch.setattr(cuda_open, "CompiledCopyKernel", missing)
                choice = "auto"
            else:
                pytest.importorskip("cuda.core")
                pytest.importorskip("cuda.bindings")
            fd = create_segment("test")
            stack.callback(os.close, fd)
            pool = HostPool(fd, PoolGeometry("model", row_bytes, rows), PLENTY)
            lock = PageLock(pool.memory)
            stack.callback(lock.close)
            stack.callback(torch.cuda.synchronize)
            draw = np.random.default_rng(row_bytes)
            pool.pages.memory[:] = draw.integers(0, 256, (rows, row_bytes), np.uint8)
            # As engines make theirs.
            with torch.inference_mode():
                start = torch.from_numpy(draw.integers(0, 256, (rows, row_bytes), np.uint8))
                device = start.cuda()
            torch.cuda.synchronize()
            return Pools(
                pool.pages.memory,
                device,
                open_gpu_row_copier(tensor_rows(device), pool.pages.page_locked(), choice),
            )

        yield make


def run_of(draw: np.random.Generator, rows: int, count: int, long_runs: bool) -> np.ndarray:
    if not long_runs:
        return draw.permutation(rows)[:count].astype(np.int32)
    start = int(draw.integers(0, rows - count + 1))
    return np.arange(start, start + count, dtype=np.int32)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("long_runs", [False, True], ids=["scattered", "one run"])
@pytest.mark.parametrize("row_bytes", [16, 4112, 65_536, 114_048, 1_000_016, 3 << 20])
def test_every_byte_arrives_and_no_other_changes(make_pools, choice, row_bytes, long_runs):
    """Rows of whole pages of memory and not, shorter and longer than a piece of the kernel."""
    rows = 41
    pools = make_pools(row_bytes, rows, choice)
    draw = np.random.default_rng(3)
    for count in (1, 7, rows):
        host_rows, pages = (run_of(draw, rows, count, long_runs) for _ in range(2))
        wanted = pools.device_bytes()
        wanted[pages] = pools.host[host_rows]
        copy = pools.copier.load(pages, host_rows)
        torch.cuda.synchronize()
        assert copy.done()
        np.testing.assert_array_equal(pools.device_bytes(), wanted)

        refill(pools.device)
        host_rows, pages = (run_of(draw, rows, count, long_runs) for _ in range(2))
        wanted = pools.host.copy()
        wanted[host_rows] = pools.device_bytes()[pages]
        copy = pools.copier.store(pages, host_rows)
        torch.cuda.synchronize()
        assert copy.done()
        np.testing.assert_array_equal(pools.host, wanted)


def refill(device: torch.Tensor) -> None:
    with torch.inference_mode():
        device.random_(0, 256)


@pytest.mark.parametrize("choice", CHOICES)
def test_the_time_of_a_copy_is_not_that_of_the_step_before_it(make_pools, choice):
    pools = make_pools(114_048, 64, choice)
    rows = np.arange(64, dtype=np.int32)
    for start in (pools.copier.store, pools.copier.load):
        for _ in range(2):  # the first turn may load kernels
            begun = torch.cuda.Event(enable_timing=True)
            slept = torch.cuda.Event(enable_timing=True)
            begun.record()
            torch.cuda._sleep(SLOW_CYCLES)
            slept.record()
            copy = start(rows, rows)
            torch.cuda.synchronize()
        assert 0 < copy.seconds() < begun.elapsed_time(slept) / 1e3 / 4


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("on_default_stream", [True, False])
def test_copies_and_steps_keep_their_order(make_pools, choice, on_default_stream):
    """A store reads what the slow step before it writes, the step after it may overwrite that, a load
    waits for the step before it, and the step after it reads what it brings."""
    rows = 64
    pools = make_pools(114_048, rows, choice)
    pages = np.arange(rows, dtype=np.int32)[::-1].copy()
    slots = np.random.default_rng(5).permutation(rows).astype(np.int32)
    stream = torch.cuda.default_stream() if on_default_stream else torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.inference_mode():
        for value in range(1, 9):
            torch.cuda._sleep(SLOW_CYCLES // 8)
            pools.device.fill_(value)
            stored = pools.copier.store(pages, slots)
            # The first turn may load kernels and page-lock memory, which waits.
            assert value == 1 or not stored.done(), "the call waited for the device"
            pools.copier.before_overwrite(pages[:1])
            pools.device.fill_(100 + value)
            stream.synchronize()
            assert stored.done()
            assert (pools.host == value).all()
            assert (pools.device == 100 + value).all()

            torch.cuda._sleep(SLOW_CYCLES // 8)
            pools.device.fill_(200)
            loaded = pools.copier.load(pages, slots)
            assert value == 1 or not loaded.done(), "the call waited for the device"
            summed = pools.device.sum(dtype=torch.int64)
            assert int(summed) == value * pools.device.numel()
            assert loaded.done()


@pytest.mark.parametrize("choice", CHOICES)
def test_stores_beside_loads_and_steps(make_pools, choice):
    """Both directions at once with steps on the engine's stream, none waiting for the others."""
    rows = 256
    pools = make_pools(114_048, rows, choice)
    low, high = np.arange(128, dtype=np.int32), np.arange(128, 256, dtype=np.int32)
    with torch.inference_mode():
        for turn in range(20):
            pools.device[:128] = turn
            stored = pools.copier.store(low, low)
            loaded = pools.copier.load(high, high)
            total = pools.device[128:].sum(dtype=torch.int64)
            pools.copier.before_overwrite(low)
            pools.device[:128] = 255
            torch.cuda.synchronize()
            assert stored.done() and loaded.done()
            assert (pools.host[:128] == turn).all()
            assert int(total) == int(pools.host[128:].sum(dtype=np.int64))


@pytest.mark.parametrize("choice", CHOICES)
def test_no_copy_makes_the_host_wait(make_pools, choice):
    """Nor does the check before a step that will overwrite what is being stored."""
    pools = make_pools(1 << 20, 64, choice)
    pages = np.arange(64, dtype=np.int32)
    # torch's allocators have their memory after this.
    pools.copier.store(pages, pages)
    pools.copier.load(pages[:3], pages[5:8])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(SLOW_CYCLES)
        stored = pools.copier.store(pages, pages)
        pools.copier.before_overwrite(pages)
        pools.copier.load(pages[:3], pages[5:8])
        assert not stored.done()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert stored.done()
