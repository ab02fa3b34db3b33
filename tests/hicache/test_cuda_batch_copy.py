"""The batched driver call: what the driver is told, and what a user is told when it refuses."""

from __future__ import annotations

import enum
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache.copies.cuda.batch import BatchCopy, bind_batch_call, try_batch_call
from hicache.copies.cuda.method import CopyMethodMissing, RowPair, address_runs, single_rows
from hicache.copies.rows import Rows
from hicache.copies.runs import RowRuns, merge_runs
from hicache.errors import HostPoolError

ROWS = RowPair(Rows(1 << 40, 96, 96, 64), Rows(1 << 20, 96, 96, 64))
STREAM = SimpleNamespace(cuda_stream=77)


class Status(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorNotSupported = 801


class Runtime:
    """What `cuda.bindings.runtime` offers, noting what it is called with."""

    cudaMemcpyAttributes = SimpleNamespace
    cudaMemcpySrcAccessOrder = SimpleNamespace(cudaMemcpySrcAccessOrderStream="stream order")

    def __init__(self, *answer: object) -> None:
        self.answer = answer
        self.calls: list[tuple] = []

    def cudaMemcpyBatchAsync(
        self, dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, stream
    ) -> tuple:
        assert len(dsts) == len(srcs) == len(sizes) == count > 0
        assert all(type(value) is int for values in (dsts, srcs, sizes) for value in values)
        assert (attrsIdxs, numAttrs) == ([0], 1)
        assert [attr.srcAccessOrder for attr in attrs] == ["stream order"]
        self.calls.append((dsts, srcs, sizes, stream))
        return self.answer


RUNS = RowRuns(np.array([3, 40]), np.array([10, 7]), np.array([2, 1]))


@pytest.mark.parametrize("answer", [(Status.cudaSuccess,), (Status.cudaSuccess, 0)])
def test_the_driver_gets_all_runs_in_one_call(answer):
    """Also where it answers with the index of the copy that failed, as in CUDA 12."""
    runtime = Runtime(*answer)
    copy = BatchCopy(ROWS, bind_batch_call(runtime))
    copy.start("load", RUNS, STREAM)
    copy.start("store", RUNS, STREAM)
    device = [(1 << 40) + 3 * 96, (1 << 40) + 40 * 96]
    host = [(1 << 20) + 10 * 96, (1 << 20) + 7 * 96]
    assert runtime.calls == [(device, host, [192, 96], 77), (host, device, [192, 96], 77)]


def test_a_refused_batch_is_one_sentence_for_the_user():
    copy = BatchCopy(ROWS, bind_batch_call(Runtime(Status.cudaErrorNotSupported)))
    with pytest.raises(HostPoolError) as error:
        copy.start("load", RUNS, STREAM)
    assert "refused to load 2 runs of 288 bytes in all" in str(error.value)
    assert "cudaErrorNotSupported" in str(error.value)
    assert "--hicache-copy kernel" in str(error.value)


def test_a_driver_without_the_call_is_found_out_by_a_copy_within_the_device():
    runtime = Runtime(Status.cudaErrorNotSupported)
    with pytest.raises(CopyMethodMissing, match="cudaErrorNotSupported"):
        try_batch_call(bind_batch_call(runtime), 4096, STREAM)
    assert runtime.calls == [([4112], [4096], [16], 77)]
    try_batch_call(bind_batch_call(Runtime(Status.cudaSuccess)), 4096, STREAM)


def test_bindings_that_take_other_arguments_are_found_out_by_it_too():
    """And those that find no driver: a start must not end with an exception of theirs."""

    def call(*_arguments: object) -> str:
        raise TypeError("takes 9 positional arguments\nbut 8 were given")

    with pytest.raises(CopyMethodMissing, match=r"\(takes 9 positional arguments\)$"):
        try_batch_call(call, 4096, STREAM)


def test_bindings_without_the_call_are_too_old():
    with pytest.raises(CopyMethodMissing, match=r"12\.8"):
        bind_batch_call(SimpleNamespace())


def test_the_real_bindings_take_the_arguments_in_this_order():
    runtime = pytest.importorskip("cuda.bindings.runtime")
    head = runtime.cudaMemcpyBatchAsync.__doc__.splitlines()[0]
    names = ["dsts:", "srcs:", "sizes:", "count,", "attrs:", "attrsIdxs:", "numAttrs,", "stream)"]
    assert [word for word in head.replace("(", " ").split() if word in names] == names
    attributes = runtime.cudaMemcpyAttributes()
    attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
    if not torch.cuda.is_available():  # with a driver, these addresses might be followed
        assert bind_batch_call(runtime)([4096], [8192], [16], 0).startswith("cudaError")


INDEXES = st.integers(0, 60)


@given(
    st.lists(INDEXES, min_size=1, max_size=20, unique=True).flatmap(
        lambda rows: st.tuples(st.just(rows), st.permutations(rows))
    ),
    st.sampled_from(["load", "store"]),
    st.sampled_from([0, 16]),
    st.sampled_from([0, 32]),
)
def test_stretches_of_bytes_are_those_of_the_rows(pairs, direction, gap, far_gap):
    """Few where neighbours lie together on both sides; one a row where rows have gaps on either."""
    device, host = (np.array(rows, np.int32) for rows in pairs)
    pools = RowPair(Rows(10_000, 96 + gap, 96, 61), Rows(500_000, 96 + far_gap, 96, 61))
    runs = merge_runs(device, host)
    target, source, num_bytes = address_runs(pools, direction, runs)
    if direction == "store":
        target, source = source, target
    got = {
        (on_device + offset, on_host + offset)
        for on_device, on_host, size in zip(target, source, num_bytes, strict=True)
        for offset in range(0, size, 16)
    }
    wanted = {
        (10_000 + d * (96 + gap) + offset, 500_000 + h * (96 + far_gap) + offset)
        for d, h in zip(*pairs, strict=True)
        for offset in range(0, 96, 16)
    }
    assert got == wanted
    assert len(target) == (len(device) if gap or far_gap else len(runs.length))
    singles = single_rows(runs)
    assert set(zip(singles.here, singles.there, strict=True)) == set(zip(*pairs, strict=True))
