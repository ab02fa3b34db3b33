"""Which Engram rows are asked for before they are looked up."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from workers.models.deepseek_v41.config.config_file import read_config
from workers.models.deepseek_v41.engram.hashing import EngramHash
from workers.models.deepseek_v41.engram.lookup import EngramLookup
from workers.models.deepseek_v41.engram.token_map import load_token_map

TINY = Path(__file__).parents[2] / "data" / "v41_tiny"
CONFIG = read_config(TINY)
TOKENS = np.random.default_rng(5).integers(3, 256, 100).astype(np.int32)


class RecordingTable:
    """Notes rows as they are hinted at and looked up."""

    def __init__(self) -> None:
        self.hinted: set[int] = set()
        self.looked_up: list[set[int]] = []
        self.missed: set[int] = set()
        self.hints = 0

    def prefetch(self, row_ids):
        self.hints += 1
        self.hinted |= set(row_ids.flatten().tolist())

    def lookup(self, row_ids, dtype, device):
        rows = set(row_ids.flatten().tolist())
        self.looked_up.append(rows)
        self.missed |= rows - self.hinted
        return torch.zeros(len(row_ids), 1)

    def close(self):
        pass


@pytest.fixture
def tables():
    return {layer: RecordingTable() for layer in CONFIG.engram_layer_ids}


def lookup_with(tables, warmup=None) -> EngramLookup:
    hashing = EngramHash(CONFIG, load_token_map(TINY, CONFIG))
    return EngramLookup(hashing, tables, 2, torch.float32, torch.device("cpu"), warmup)


def prefill(lookup, slot, start, chunk, tokens=TOKENS):
    lookup.begin(slot, tokens, start)
    for at in range(start, len(tokens), chunk):
        lookup.prompts([(slot, at, tokens[at : at + chunk])])


@pytest.mark.parametrize("chunk", [100, 33, 7, 2, 1])
@pytest.mark.parametrize("start", [0, 60])
def test_all_rows_of_a_prompt_are_asked_for_first(tables, start, chunk):
    """Those of its first chunk too, which may be its only one or the rest after a prefix hit."""
    prefill(lookup_with(tables), 0, start, chunk)
    for table in tables.values():
        assert sum(map(len, table.looked_up)) > 0
        assert not table.missed


def test_later_chunks_are_asked_for_once(tables):
    prefill(lookup_with(tables), 0, 0, 25)
    assert {table.hints for table in tables.values()} == {4}


def test_a_chunk_longer_than_expected_is_asked_for_anew(tables):
    lookup = lookup_with(tables)
    lookup.begin(0, TOKENS, 0)
    for begin, end in ((0, 10), (10, 100)):
        lookup.prompts([(0, begin, TOKENS[begin:end])])
    assert not any(table.missed for table in tables.values())


def test_rows_of_a_decode_are_asked_for_together(tables):
    lookup = lookup_with(tables)
    for slot in (0, 1):
        prefill(lookup, slot, 0, 100, TOKENS[slot:])
    for table in tables.values():
        table.hinted.clear()
    lookup.decodes([0, 1], torch.tensor([7, 9]))
    assert not any(table.missed for table in tables.values())


def test_nothing_is_asked_for_once_all_is_in_memory(tables):
    warmup = SimpleNamespace(complete=False)
    lookup = lookup_with(tables, warmup)
    prefill(lookup, 0, 0, 25)
    warmup.complete = True
    before = [table.hints for table in tables.values()]
    prefill(lookup, 0, 0, 25)
    lookup.decodes([0], torch.tensor([7]))
    assert [table.hints for table in tables.values()] == before
    assert all(len(table.looked_up) == 9 for table in tables.values())
