"""Which rows `deepinfer bench page-copy` copies: scattered ones of many sizes, and whole prompts."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final, NamedTuple

import numpy as np

from hicache.copies.runs import IndexArray, merge_runs
from hicache.pool.run_allocator import RunAllocator
from workers.scheduling.index_pool import IndexPool

ROW_SIZES: Final = (16 << 10, 64 << 10, 114_048, 256 << 10, 1 << 20, 4 << 20)
V41_PAGE_BYTES: Final = 114_048
"""A page of 128 tokens of DeepSeek-V4.1 with compact KV."""
PROMPT_PAGES: Final = 256
"""32K tokens."""
MAX_ROWS: Final = 4096
MAX_BYTES: Final = 512 << 20
"""Limits of the scattered rows that are copied in each direction."""
CHUNK_PAGES: Final = 64
"""Device pages that a prompt step of 8192 tokens takes."""


class RowPairs(NamedTuple):
    """Device row `here[i]` and host row `there[i]` belong together, int32 [n] each."""

    here: IndexArray
    there: IndexArray


@dataclass(frozen=True)
class CopyCase:
    """Rows to load and rows to store, all different."""

    name: str
    row_bytes: int
    device_rows: int
    """Size of the device pool."""
    host_rows: int
    load: RowPairs
    store: RowPairs

    def mean_run_bytes(self) -> float:
        runs = sum(len(merge_runs(*pairs).length) for pairs in (self.load, self.store))
        return (len(self.load.here) + len(self.store.here)) * self.row_bytes / runs


def all_cases(seed: int = 0) -> list[CopyCase]:
    draw = Random(seed)
    return [scattered_rows(size, draw) for size in ROW_SIZES] + prompts(seed)


def prompts(seed: int = 0) -> list[CopyCase]:
    return [fresh_prompts(), churned_prompts(Random(seed))]


def scattered_rows(row_bytes: int, draw: Random) -> CopyCase:
    count = min(MAX_ROWS, MAX_BYTES // row_bytes)
    device, host = (draw.sample(range(2 * count), 2 * count) for _ in range(2))
    pairs = RowPairs(np.array(device, np.int32), np.array(host, np.int32))
    return CopyCase(
        f"rows of {row_bytes:,} B",
        row_bytes,
        2 * count,
        2 * count,
        RowPairs(pairs.here[:count], pairs.there[:count]),
        RowPairs(pairs.here[count:], pairs.there[count:]),
    )


def fresh_prompts(pages: int = PROMPT_PAGES) -> CopyCase:
    device, host = IndexPool(2 * pages), RunAllocator(2 * pages)
    load, store = (RowPairs(_take_pages(device, pages), host.take(pages)) for _ in range(2))
    return CopyCase("32K prompt, fresh", V41_PAGE_BYTES, 2 * pages, 2 * pages, load, store)


def churned_prompts(
    draw: Random,
    pages: int = PROMPT_PAGES,
    device_rows: int = 4096,
    host_rows: int = 16_384,
    turns: int = 4000,
) -> CopyCase:
    """In pools that many prompts have come to and gone from, both kept nearly full.

    On the device whole sequences go, in any order. In the host pool it is the ends of prefixes that are
    evicted, and now and then all of one.
    """
    device, host = IndexPool(device_rows), RunAllocator(host_rows)
    sequences: list[list[int]] = []
    prefixes: list[IndexArray] = []
    for _ in range(turns):
        wanted = draw.randint(1, 2 * pages)
        while device.num_free < wanted:
            device.give_back(sequences.pop(draw.randrange(len(sequences))))
        sequences.append(_take_pages(device, wanted).tolist())
        while host.num_free < wanted:
            _evict(host, prefixes, draw)
        prefixes.append(host.take(wanted))
    while device.num_free < 2 * pages:
        device.give_back(sequences.pop(draw.randrange(len(sequences))))
    while host.num_free < 2 * pages:
        _evict(host, prefixes, draw)
    load, store = (RowPairs(_take_pages(device, pages), host.take(pages)) for _ in range(2))
    return CopyCase("32K prompt, churned", V41_PAGE_BYTES, device_rows, host_rows, load, store)


def _take_pages(pool: IndexPool, count: int) -> IndexArray:
    taken: list[int] = []
    while len(taken) < count:
        taken += pool.take(min(CHUNK_PAGES, count - len(taken)))
    return np.array(taken, np.int32)


def _evict(host: RunAllocator, prefixes: list[IndexArray], draw: Random) -> None:
    place = draw.randrange(len(prefixes))
    prefix = prefixes[place]
    kept = draw.choice((0, len(prefix) // 2, len(prefix) * 3 // 4))
    host.give_back(prefix[kept:])
    prefixes[place] = prefix[:kept]
    if not kept:
        prefixes.pop(place)
