"""Speed of the attention kernels on a GPU: `python -m benchmarks.kernels`.

Shapes are those of Llama 3.1 8B, in bfloat16. Calls go round several layers of a pool whose pages are
scattered, so that the L2 cache holds nothing of the next call. Times are medians of replayed graphs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Final

import cyclopts
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from workers.attention.batch import BatchTensors, Segment
from workers.attention.math import AttentionOptions
from workers.attention.triton.hopper_prefill import hopper_prefill, is_covered
from workers.attention.triton.paged_decode import (
    DecodePlan,
    choose_key_block,
    choose_programs,
    paged_decode,
    plan_decode,
)
from workers.attention.triton.paged_prefill import list_tiles, paged_prefill
from workers.attention.triton.store import store
from workers.contract import PAGE_TOKENS

HEADS: Final = 32
KV_HEADS: Final = 8
DIM: Final = 128
LAYERS: Final = 32
BANDWIDTH: Final = 4.1e12
"""Bytes a second that a copy on the device reaches on an H200."""
COLD_BYTES: Final = 1 << 29
"""A round of calls reads at least this much, many times the L2 cache."""
DEVICE: Final = torch.device("cuda")
OPTIONS: Final = AttentionOptions(scaling=DIM**-0.5)
PROMPTS: Final = (
    (512, 0), (2048, 0), (8192, 0), (32768, 0), (2048, 6144), (8192, 24576), (8192, 57344),
)  # fmt: skip
"""Rows of a prompt chunk, and the keys before it."""


class Pool:
    """Pages of `layers` layers for sequences of equal length."""

    def __init__(self, sequences: int, tokens: int, layers: int) -> None:
        columns = -(-tokens // PAGE_TOKENS)
        count = sequences * columns
        part = PAGE_TOKENS * KV_HEADS * DIM
        rows = torch.empty(count, layers * 2 * part, dtype=torch.bfloat16, device=DEVICE).normal_()
        views = rows.view(count, layers, 2, PAGE_TOKENS, KV_HEADS, DIM)
        self.layers = layers
        self.keys = [views[:, layer, 0] for layer in range(layers)]
        self.values = [views[:, layer, 1] for layer in range(layers)]
        order = np.random.default_rng(1).permutation(count).astype(np.int32)
        self.block_table = torch.from_numpy(order).view(sequences, columns).to(DEVICE)


def cold_layers(bytes_a_layer: int) -> int:
    return max(1, min(LAYERS, -(-COLD_BYTES // bytes_a_layer)))


def random(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.bfloat16, device=DEVICE)


def seconds(round_of_calls: Callable[[], object], repeats: int = 5) -> float:
    """Median time of one round, replayed as a graph."""
    round_of_calls()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        round_of_calls()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def time_decode(batch: int, tokens: int) -> tuple[float, float]:
    """(seconds of a layer, seconds of the step's plan)."""
    pool = Pool(batch, tokens, cold_layers(batch * tokens * KV_HEADS * DIM * 4))
    query = random(batch, HEADS, DIM)
    slots = torch.arange(batch, device=DEVICE)
    positions = torch.full((batch,), tokens - 1, device=DEVICE)
    processors = torch.cuda.get_device_properties(DEVICE).multi_processor_count

    def plan() -> DecodePlan:
        return plan_decode(
            positions,
            slots,
            pool.block_table,
            kv_heads=KV_HEADS,
            window=None,
            programs=choose_programs(batch, KV_HEADS, processors),
            key_block=choose_key_block(query, pool.keys[0], pool.values[0]),
        )

    once = plan()

    def plan_all() -> None:
        for _ in range(10):
            plan()

    def attend_all() -> None:
        for keys, values in zip(pool.keys, pool.values, strict=True):
            paged_decode(query, keys, values, pool.block_table, once, OPTIONS)

    return seconds(attend_all) / pool.layers, seconds(plan_all) / 10


def time_store(rows: int) -> float:
    pool = Pool(1, rows, cold_layers(rows * KV_HEADS * DIM * 4))
    both = random(rows, 2, KV_HEADS, DIM)
    positions = torch.arange(rows, device=DEVICE)
    none = torch.empty(0)
    tensors = BatchTensors(
        none, positions, torch.zeros_like(positions), none, none, pool.block_table
    )

    def store_all() -> None:
        for keys, values in zip(pool.keys, pool.values, strict=True):
            store(both[:, 0], both[:, 1], keys, values, tensors)

    return seconds(store_all) / pool.layers


def time_prefill(prefill: Callable[..., Tensor], rows: int, history: int) -> float:
    pool = Pool(1, history + rows, 4)
    query = random(rows, HEADS, DIM)
    tiles = torch.from_numpy(list_tiles([Segment(0, 0, history, rows)])).to(DEVICE)

    def attend_all() -> None:
        for keys, values in zip(pool.keys, pool.values, strict=True):
            prefill(query, keys, values, pool.block_table, tiles, OPTIONS)

    return seconds(attend_all) / pool.layers


def time_sdpa(backend: SDPBackend, rows: int) -> tuple[float, float]:
    """PyTorch's attention of a first chunk: (seconds, seconds of the first call with this shape)."""
    query = random(rows, HEADS, DIM)[None].transpose(1, 2)
    key, value = (random(rows, KV_HEADS, DIM)[None].transpose(1, 2) for _ in range(2))

    def attend() -> None:
        scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    with sdpa_kernel(backend):
        torch.cuda.synchronize()
        start = time.perf_counter()
        attend()
        torch.cuda.synchronize()
        first = time.perf_counter() - start
        return seconds(attend), first


def prefill_flops(rows: int, history: int) -> int:
    pairs = rows * history + rows * (rows + 1) // 2
    return 4 * pairs * HEADS * DIM


def decode_table() -> Table:
    table = Table(
        "batch", "context", "µs a layer", "GB/s", "of 4.1 TB/s", "plan µs", title="decode"
    )
    for tokens in (1024, 8192, 65536):
        for batch in (1, 16, 64, 256):
            read = batch * tokens * KV_HEADS * DIM * 4
            if read > torch.cuda.mem_get_info()[0] * 0.9:
                continue
            layer, plan = time_decode(batch, tokens)
            torch.cuda.empty_cache()
            table.add_row(
                f"{batch}",
                f"{tokens}",
                f"{layer * 1e6:.1f}",
                f"{read / layer / 1e9:.0f}",
                f"{read / layer / BANDWIDTH:.1%}",
                f"{plan * 1e6:.1f}",
            )
    return table


def prefill_table() -> Table:
    table = Table("kernel", "rows", "history", "ms a layer", "TFLOP/s", title="prefill")
    some = random(1, 1, DIM)
    on_hopper = is_covered(some, some[None], some[None])
    for prefill in (paged_prefill, hopper_prefill)[: 1 + on_hopper]:
        for rows, history in PROMPTS:
            layer = time_prefill(prefill, rows, history)
            rate = prefill_flops(rows, history) / layer / 1e12
            table.add_row(
                prefill.__name__, f"{rows}", f"{history}", f"{layer * 1e3:.3f}", f"{rate:.0f}"
            )
    return table


def sdpa_table() -> Table:
    table = Table(
        "back end", "rows", "ms", "TFLOP/s", "first call ms", title="PyTorch's, first chunk"
    )
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        for rows in (2048, 8192, 8193, 32768):
            layer, first = time_sdpa(backend, rows)
            rate = prefill_flops(rows, 0) / layer / 1e12
            table.add_row(
                backend.name, f"{rows}", f"{layer * 1e3:.3f}", f"{rate:.0f}", f"{first * 1e3:.1f}"
            )
    return table


def store_table() -> Table:
    table = Table("rows", "µs a layer", "GB/s read and written", title="store")
    for rows in (1, 64, 256, 8192):
        layer = time_store(rows)
        moved = rows * KV_HEADS * DIM * 8
        table.add_row(f"{rows}", f"{layer * 1e6:.1f}", f"{moved / layer / 1e9:.0f}")
    return table


def main() -> None:
    console = Console(width=110)
    with torch.inference_mode():
        for make in (decode_table, store_table, prefill_table, sdpa_table):
            console.print(make())
            torch.cuda.empty_cache()


if __name__ == "__main__":
    cyclopts.run(main)
