"""The Triton kernels against plain attention in float64.

On a GPU they run compiled. Elsewhere they run in Triton's interpreter, on a CPU, if Triton is installed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from tests.support.triton_kernels import DEVICE, MARKS, ON_GPU
from workers.attention.batch import Batch, BatchTensors, Segment
from workers.attention.math import AttentionOptions
from workers.attention.page_pool import PagePool
from workers.attention.torch_attention import TorchAttention
from workers.attention.triton.backend import TritonAttention, create_attention
from workers.attention.triton.hopper_prefill import hopper_prefill, is_covered
from workers.attention.triton.paged_decode import (
    choose_key_block,
    paged_decode,
    plan_decode,
)
from workers.attention.triton.paged_prefill import (
    TileShape,
    list_tiles,
    paged_prefill,
)
from workers.attention.triton.store import store
from workers.contract import DecodeRow, StepPlan
from workers.engine.step_buffers import StepBuffers
from workers.models.hf.page_layout import LayerShape, build_cache_layout

pytestmark = MARKS
SLOTS = 9
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TOLERANCES = {F32: 2e-5, F16: 4e-3, BF16: 3e-2}


@dataclass(frozen=True)
class Shape:
    kv_heads: int
    group: int
    dim: int
    value_dim: int
    pages: torch.dtype = F32
    queries: torch.dtype = F32

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


def options(variant: str, shape: Shape, window: int | None = None) -> AttentionOptions:
    generator = torch.Generator().manual_seed(5)
    sinks = torch.randn(shape.heads, generator=generator) * 2
    return AttentionOptions(
        scaling=0.9 * shape.dim**-0.5,
        window=window,
        softcap=1.5 if variant == "softcap" else None,
        sinks=sinks.to(DEVICE, shape.queries) if variant == "sinks" else None,
    )


class Sequences:
    """Random sequences whose pages are scattered over a pool of one layer; all else in it is NaN."""

    def __init__(self, shape: Shape, lengths: list[int], seed: int = 0) -> None:
        self.shape, self.lengths = shape, lengths
        self.random = torch.Generator().manual_seed(seed)
        self.key = [self.normal(n, shape.kv_heads, shape.dim) for n in lengths]
        self.value = [self.normal(n, shape.kv_heads, shape.value_dim) for n in lengths]
        columns = max(lengths) // 128 + 1
        count = SLOTS * columns
        layout = build_cache_layout(
            [LayerShape(shape.kv_heads, shape.dim, shape.value_dim)],
            str(shape.pages).removeprefix("torch."),
            LlamaConfig(),
            "w",
        )
        self.pool = PagePool(layout, count + 3, DEVICE)
        self.keys, self.values = (
            self.pool.keys[0].fill_(torch.nan),
            self.pool.values[0].fill_(torch.nan),
        )
        order = np.random.default_rng(seed).permutation(count + 3)[:count].astype(np.int32)
        self.block_table = torch.from_numpy(order).view(SLOTS, columns).to(DEVICE)
        self.slots = torch.randperm(SLOTS, generator=self.random)[: len(lengths)]

    def normal(self, *sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=self.random).to(DEVICE, self.shape.queries)

    def tensors(self, starts: list[int], ends: list[int]) -> BatchTensors:
        """Rows of all sequences, from their start to their end."""
        spans = list(zip(starts, ends, strict=True))
        rows = [torch.full((b - a,), int(s)) for s, (a, b) in zip(self.slots, spans, strict=True)]
        none = torch.empty(0)
        return BatchTensors(
            token_ids=none,
            positions=torch.cat([torch.arange(a, b) for a, b in spans]).to(DEVICE),
            row_slots=torch.cat(rows).to(DEVICE),
            slots=self.slots.to(DEVICE),
            logit_rows=none,
            block_table=self.block_table,
        )

    def store_all(self) -> None:
        tensors = self.tensors([0] * len(self.lengths), self.lengths)
        store(torch.cat(self.key), torch.cat(self.value), self.keys, self.values, tensors)

    def reference(
        self, query: torch.Tensor, sequence: int, start: int, options: AttentionOptions
    ) -> torch.Tensor:
        """Of `query` [T,H,D] at `start` and on."""
        end = start + len(query)
        key, value = (
            x[sequence][:end].to(self.shape.pages).double().repeat_interleave(self.shape.group, 1)
            for x in (self.key, self.value)
        )
        scores = torch.einsum("thd,lhd->htl", query.double(), key) * options.scaling
        if options.softcap is not None:
            scores = torch.tanh(scores / options.softcap) * options.softcap
        at, keys = torch.arange(start, end)[:, None], torch.arange(end)[None]
        seen = keys <= at
        if options.window is not None:
            seen &= keys > at - options.window
        scores = scores.masked_fill(~seen.to(DEVICE), float("-inf"))
        if options.sinks is not None:
            sinks = options.sinks.double()[:, None, None].expand(-1, len(query), 1)
            scores = torch.cat([scores, sinks], 2)
        return torch.einsum("htl,lhd->thd", scores.softmax(2)[..., :end], value)


def check(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCES[dtype]
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


SMALL = Shape(1, 2, 16, 16)
SHAPES = [
    Shape(1, 1, 64, 64),
    Shape(2, 2, 40, 24),
    Shape(1, 20, 16, 32, F16, F16),
    Shape(1, 2, 256, 256, F16, F16),
    Shape(1, 4, 32, 32, F32, F16),
    Shape(1, 4, 32, 32, F16, F32),
]
if ON_GPU:  # the interpreter is slow, and NumPy has no bfloat16
    SHAPES += [
        Shape(2, 3, 80, 48),
        Shape(1, 7, 96, 96),
        Shape(1, 32, 24, 8),
        Shape(3, 3, 128, 128, F16, F16),
        Shape(8, 4, 128, 128, BF16, BF16),
        Shape(2, 16, 80, 80, BF16, BF16),
        Shape(2, 4, 192, 128, BF16, BF16),
        Shape(4, 2, 256, 256, BF16, BF16),
        Shape(1, 32, 64, 64, BF16, BF16),
        Shape(2, 4, 128, 128, F32, BF16),
        Shape(2, 4, 256, 256, F32, F32),
    ]
VARIANTS = ["plain", "softcap", "sinks"]
WINDOWS = [None, 1, 63, 64, 65, 127, 128, 129, 130, 400] if ON_GPU else [None, 1, 64, 129]
CASES = [(s, v) for s in SHAPES for v in VARIANTS]
if not ON_GPU:
    CASES = list(zip(SHAPES, itertools.cycle(VARIANTS), strict=False))


def decode(data: Sequences, asked: AttentionOptions, programs: int, layers: int = 1) -> None:
    """Decode the last token of every sequence, rows of padding among them."""
    shape, lengths = data.shape, data.lengths
    data.store_all()
    query = data.normal(len(lengths) + 2, shape.heads, shape.dim)
    positions = torch.tensor([-1, *(n - 1 for n in lengths), -1], device=DEVICE)
    slots = torch.tensor([0, *data.slots.tolist(), 0], device=DEVICE)
    key_block = choose_key_block(query, data.keys, data.values)
    plan = plan_decode(
        positions,
        slots,
        data.block_table,
        kv_heads=shape.kv_heads,
        window=asked.window,
        programs=programs * shape.kv_heads,
        key_block=key_block,
    )
    for _ in range(layers):
        got = paged_decode(query, data.keys, data.values, data.block_table, plan, asked)
        assert not got[[0, -1]].any()
        for sequence, length in enumerate(lengths):
            row = query[sequence + 1, None]
            want = data.reference(row, sequence, length - 1, asked)
            check(got[sequence + 1, None], want, shape.queries)


@pytest.mark.parametrize(("shape", "variant"), CASES, ids=str)
def test_decode_of_every_shape(shape: Shape, variant: str) -> None:
    decode(Sequences(shape, [1, 127, 300]), options(variant, shape), programs=6)


def test_layers_use_a_plan_one_after_the_other() -> None:
    decode(Sequences(SMALL, [300, 1]), options("plain", SMALL), programs=4, layers=3)


@pytest.mark.parametrize("programs", [1, 3, 40] if ON_GPU else [9])
@pytest.mark.parametrize("window", WINDOWS)
def test_decode_at_borders(window: int | None, programs: int) -> None:
    data = Sequences(SMALL, [1, 32, 33, 128, 129, 257])
    decode(data, options("sinks", SMALL, window), programs)


def prefill(
    data: Sequences,
    starts: list[int],
    asked: AttentionOptions,
    tile: TileShape | None = None,
    bulk_copies: bool = True,
) -> None:
    """Compute all rows from each sequence's start to its end in one call."""
    shape = data.shape
    data.store_all()
    segments, rows = [], 0
    for slot, start, end in zip(data.slots.tolist(), starts, data.lengths, strict=True):
        segments.append(Segment(slot, rows, start, end - start))
        rows += end - start
    query = data.normal(rows, shape.heads, shape.dim)
    tiles = torch.from_numpy(list_tiles(segments)).to(DEVICE)
    inputs = query, data.keys, data.values, data.block_table, tiles, asked
    results = [paged_prefill(*inputs, shape=tile, bulk_copies=bulk_copies)]
    if is_covered(query, data.keys, data.values):
        results.append(hopper_prefill(*inputs))
    for sequence, segment in enumerate(segments):
        own = slice(segment.first_row, segment.first_row + segment.rows)
        want = data.reference(query[own], sequence, segment.start, asked)
        for got in results:
            check(got[own], want, shape.queries)


@pytest.mark.parametrize("bulk_copies", [True, False] if ON_GPU else [True])
@pytest.mark.parametrize(("shape", "variant"), CASES, ids=str)
def test_prefill_of_every_shape(shape: Shape, variant: str, bulk_copies: bool) -> None:
    data = Sequences(shape, [1, 40, 150])
    prefill(data, [0, 0, 120], options(variant, shape), bulk_copies=bulk_copies)


TILES = [None, TileShape(16, 128, 4, 2), TileShape(64, 16, 4, 2)]
SMALL_SHAPES = [SMALL, Shape(1, 2, 64, 64, BF16, BF16), Shape(2, 1, 80, 48, F16, F16)]


@pytest.mark.parametrize("tile", TILES if ON_GPU else [TileShape(64, 64, 4, 2)], ids=str)
@pytest.mark.parametrize("shape", SMALL_SHAPES if ON_GPU else [SMALL], ids=str)
@pytest.mark.parametrize("window", WINDOWS)
def test_prefill_at_borders(window: int | None, shape: Shape, tile: TileShape | None) -> None:
    """Whole prompts, chunks after a history, and single rows."""
    data = Sequences(shape, [1, 129, 257, 130, 200, 256])
    prefill(data, [0, 0, 250, 127, 170, 255], options("sinks", shape, window), tile)


@pytest.mark.parametrize("shape", [SMALL, Shape(3, 1, 80, 48, F16, F32)], ids=str)
def test_storing_writes_every_row_and_nothing_else(shape: Shape) -> None:
    """Also from rows that are not contiguous, and not for rows of padding."""
    data = Sequences(shape, [1, 127, 128, 130])
    tensors = data.tensors([0, 100, 127, 120], data.lengths)
    tensors.positions[3] = -1
    rows = len(tensors.positions)
    both = data.normal(shape.kv_heads, rows, shape.dim + shape.value_dim).transpose(0, 1)
    key, value = both[..., : shape.dim], both[..., shape.dim :]
    before = data.pool.rows.clone()
    store(key, value, data.keys, data.values, tensors)
    want = PagePool(data.pool.layout, data.pool.num_pages, DEVICE)
    want.rows.copy_(before)
    kept = tensors.positions >= 0
    at, slots = tensors.positions[kept], tensors.row_slots[kept]
    places = tensors.block_table[slots, at // 128].long(), at % 128
    want.store(0, *places, key[kept], value[kept])
    assert torch.equal(data.pool.rows, want.rows)


def run_steps(data: Sequences, asked: AttentionOptions) -> None:
    """Two prompt steps, then a decode step, through the engine's interface."""
    attention = TritonAttention(data.pool)
    buffers = StepBuffers(DEVICE, 1 if ON_GPU else 0, 1024, SLOTS, data.block_table.shape[1])
    starts = [0] * len(data.lengths)
    for advance in (30, 99, 1):
        ends = [min(a + advance, n) for a, n in zip(starts, data.lengths, strict=True)]
        segments, rows = [], 0
        for slot, start, end in zip(data.slots.tolist(), starts, ends, strict=True):
            segments.append(Segment(slot, rows, start, end - start))
            rows += end - start
        decodes = tuple(DecodeRow(s.slot, s.start) for s in segments) if advance == 1 else ()
        buffers.begin()
        attention.prepare(Batch(StepPlan(1, decodes=decodes), tuple(segments), ()), buffers)
        buffers.send()
        attention.begin(data.tensors(starts, ends))
        query = data.normal(rows, data.shape.heads, data.shape.dim)
        key, value = (
            torch.cat([x[i][s.start : s.end] for i, s in enumerate(segments)])
            for x in (data.key, data.value)
        )
        got = attention.attend(0, query, key, value, asked)
        for sequence, segment in enumerate(segments):
            own = slice(segment.first_row, segment.first_row + segment.rows)
            want = data.reference(query[own], sequence, segment.start, asked)
            check(got[own], want, data.shape.queries)
        starts = ends


STORED = [Shape(1, 2, 16, 16, F32, F32), Shape(1, 1, 16, 16, F16, F32)]
if ON_GPU:
    STORED += [Shape(8, 4, 128, 128, BF16, BF16), Shape(2, 3, 64, 64, BF16, F32)]


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("shape", STORED, ids=str)
def test_steps_see_the_kv_of_earlier_ones(shape: Shape, window: int | None) -> None:
    """A token's KV is what the pool's type keeps of it, already in the step that stores it."""
    run_steps(Sequences(shape, [130, 130]), options("plain", shape, window))


def test_large_heads_are_left_to_pytorch() -> None:
    data = Sequences(Shape(1, 1, 264, 16), [1])
    assert isinstance(create_attention(data.pool), TorchAttention)
    assert isinstance(create_attention(Sequences(SMALL, [1]).pool), TritonAttention)


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA GPU")
def test_a_graph_of_a_decode_step_can_be_replayed_for_other_lengths() -> None:
    shape = Shape(2, 4, 64, 64, BF16, BF16)
    data = Sequences(shape, [700, 5, 130, 256])
    data.store_all()
    asked = options("plain", shape)
    attention = TritonAttention(data.pool)
    tensors = data.tensors([n - 1 for n in data.lengths], data.lengths)
    batch = Batch(StepPlan(1, decodes=(DecodeRow(0, 0),)), (), ())
    query = data.normal(4, shape.heads, shape.dim)
    key, value = data.normal(4, 2, 64), data.normal(4, 2, 64)

    def step() -> torch.Tensor:
        attention.begin(tensors)
        return attention.attend(0, query, key, value, asked)

    attention.prepare(batch, StepBuffers(DEVICE, 1, 8, SLOTS, 8))
    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for lengths in ([700, 5, 130, 256], [1, 5, 128, 129], [64, 4, 1, 0]):
        tensors.positions.copy_(torch.tensor(lengths) - 1)
        graph.replay()
        for sequence, length in enumerate(lengths):
            if length == 0:
                assert not got[sequence].any()
                continue
            data.key[sequence][length - 1] = key[sequence]
            data.value[sequence][length - 1] = value[sequence]
            want = data.reference(query[sequence, None], sequence, length - 1, asked)
            check(got[sequence, None], want, BF16)
