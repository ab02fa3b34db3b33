"""Which ways to copy are used, by what the user wants and what the machine has."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from hicache.copies.cache_copies import DeviceCache
from hicache.copies.cuda import open as cuda_open
from hicache.copies.cuda.method import CopyMethodMissing, RowPair
from hicache.copies.cuda.open import check_copy, choose_methods
from hicache.copies.cuda.rows import GpuRows
from hicache.copies.open import open_cache_copies
from hicache.copies.rows import HostRows
from hicache.errors import HostPoolError

SINGLE, BATCH, KERNEL = object(), object(), object()


def openers(*missing: str):
    def opener(name, method):
        def open_it():
            if name in missing:
                raise CopyMethodMissing(f"the package cuda-{name} is missing")
            return method

        return open_it

    return {"batch": opener("batch", BATCH), "kernel": opener("kernel", KERNEL)}


@pytest.mark.parametrize(
    ("missing", "long_runs", "short_runs", "told"),
    [
        ([], BATCH, KERNEL, []),
        (["kernel"], BATCH, BATCH, ["one way only", "cuda-kernel is missing"]),
        (["batch"], KERNEL, KERNEL, ["one way only", "cuda-batch is missing"]),
        (["batch", "kernel"], SINGLE, SINGLE, ["slow", "cuda-batch is", "cuda-kernel is", "'gpu'"]),
    ],
)
def test_auto_makes_do_with_what_there_is_and_says_so_once(
    missing, long_runs, short_runs, told, caplog
):
    methods = choose_methods("auto", openers(*missing), SINGLE, 4096)
    assert (methods.long_runs, methods.short_runs) == (long_runs, short_runs)
    assert len(caplog.records) == (1 if missing else 0)
    for words in told:
        assert words in caplog.text


@pytest.mark.parametrize(("choice", "method"), [("batch", BATCH), ("kernel", KERNEL)])
def test_a_way_that_is_asked_for_is_used_for_all_runs_or_refused(choice, method):
    methods = choose_methods(choice, openers(), SINGLE, 4096)
    assert methods.long_runs is methods.short_runs is method
    with pytest.raises(HostPoolError, match=f"--hicache-copy {choice} .*'gpu'"):
        choose_methods(choice, openers(choice), SINGLE, 4096)


@pytest.mark.parametrize("num_bytes", [0, 15, 16])
def test_a_trial_copy_is_believed_by_its_bytes(monkeypatch, num_bytes):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    def attempt(scratch: int) -> None:
        ctypes.memmove(scratch + 16, scratch, num_bytes)

    if num_bytes == 16:
        check_copy(torch.device("cpu"), attempt)
    else:
        with pytest.raises(CopyMethodMissing, match="other bytes"):
            check_copy(torch.device("cpu"), attempt)


def test_copies_that_cannot_be_had_leave_no_memory_locked(monkeypatch):
    memory, locked = np.zeros(128, np.uint8), []

    class Lock:
        def __init__(self, held: np.ndarray) -> None:
            locked.append(held)

        def close(self) -> None:
            locked.pop()

    def refuse(here: GpuRows, there: HostRows, choice: str) -> None:
        assert there.is_page_locked and len(locked) == 1
        raise HostPoolError("no such way to copy")

    monkeypatch.setattr(cuda_open, "PageLock", Lock)
    monkeypatch.setattr(cuda_open, "open_gpu_row_copier", refuse)
    pages = HostRows.packed(memory, 16, 4)
    device = DeviceCache(GpuRows(0, 16, 16, 4, torch.zeros(4, 16, dtype=torch.uint8)))
    with pytest.raises(HostPoolError, match="no such way"):
        open_cache_copies(device, memory, pages, pages, "batch")
    assert not locked


def test_a_gpu_copies_to_page_locked_memory_of_equal_rows_only():
    here = GpuRows(0, 16, 16, 4, torch.zeros(4, 16, dtype=torch.uint8))
    there = HostRows.packed(np.zeros(128, np.uint8), 16, 4)
    with pytest.raises(ValueError, match="page-locked memory only"):
        cuda_open.open_gpu_row_copier(here, there, "auto")
    with pytest.raises(ValueError, match="rows of 16 bytes here and of 32 bytes there"):
        RowPair(here, HostRows.packed(np.zeros(128, np.uint8), 32, 4))
