"""Engram tables: rows from the file, hints, and rows without a file."""

import os
import threading
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from workers.models.deepseek_v41.config.config_file import read_config
from workers.models.deepseek_v41.engram.table import (
    DummyEngramTable,
    MappedEngramTable,
    open_engram_table,
)
from workers.models.deepseek_v41.weights.checkpoint import open_checkpoint
from workers.models.deepseek_v41.weights.formats import dequantize_rows

TINY = Path(__file__).parents[2] / "data" / "v41_tiny"
QUANTISED = TINY.with_name("v41_tiny_quant")


def table_of(folder: Path, layer: int = 1) -> MappedEngramTable:
    return open_engram_table(open_checkpoint(folder, read_config(folder)), layer)


@pytest.fixture
def row_ids() -> torch.Tensor:
    return torch.randint(0, 606, (50, 6), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def quantised_table():
    table = table_of(QUANTISED)
    yield table
    table.close()


@pytest.mark.parametrize("layer", [1, 3])
def test_quantised_rows_are_decoded_exactly(layer, row_ids):
    weights = load_file(QUANTISED / "model.safetensors")
    whole = dequantize_rows(
        weights[f"layers.{layer}.engram.embed.weight"],
        weights[f"layers.{layer}.engram.embed.scale"],
    )
    table = table_of(QUANTISED, layer)
    assert torch.equal(table.lookup(row_ids), whole[row_ids].flatten(1))
    table.close()


def test_golden_rows(quantised_table):
    golden = load_file(QUANTISED / "golden.safetensors")["dequant.layers.1.engram.embed.weight"]
    ids = torch.arange(len(golden)).unsqueeze(1)
    assert torch.equal(quantised_table.lookup(ids), golden)


def test_plain_rows_are_read_as_they_are(row_ids):
    whole = load_file(TINY / "model.safetensors")["layers.1.engram.embed.weight"]
    table = table_of(TINY)
    assert torch.equal(table.lookup(row_ids), whole[row_ids].flatten(1))
    half = table.lookup(row_ids, dtype=torch.bfloat16)
    assert torch.equal(half, whole[row_ids].flatten(1).to(torch.bfloat16))
    table.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_half_precision(tmp_path, row_ids, dtype):
    weights = load_file(TINY / "model.safetensors")
    name = "layers.1.engram.embed.weight"
    weights[name] = weights[name].to(dtype)
    save_file(weights, tmp_path / "model.safetensors")
    table = open_engram_table(open_checkpoint(tmp_path, read_config(TINY)), 1)
    assert torch.equal(table.lookup(row_ids), weights[name][row_ids].flatten(1).float())
    table.close()


def test_no_rows_give_an_empty_result(quantised_table):
    found = quantised_table.lookup(torch.empty(0, 6, dtype=torch.int64))
    assert found.shape == (0, 192)
    quantised_table.prefetch(torch.empty(0, 6, dtype=torch.int64))


def test_mapping_is_silent_and_needs_no_memory_of_its_own():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table_of(QUANTISED).close()


@pytest.mark.parametrize("bad", [-1, 606])
def test_a_row_outside_of_the_table_is_an_error(quantised_table, bad):
    with pytest.raises(IndexError):
        quantised_table.lookup(torch.tensor([[bad]]))


class Advice:
    """Records what the kernel is asked to read; can hold the asking thread back."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.go = threading.Event()
        self.asked = threading.Semaphore(0)

    def __call__(self, fd: int, begin: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        self.ranges.append((begin, begin + length))
        self.asked.release()
        assert self.go.wait(30)

    def covers(self, begin: int, end: int) -> bool:
        return any(a <= begin and end <= b for a, b in self.ranges)


@pytest.fixture
def advice(monkeypatch) -> Advice:
    recorder = Advice()
    monkeypatch.setattr(os, "posix_fadvise", recorder)
    return recorder


def test_a_hint_asks_for_the_pages_of_its_rows(tmp_path, advice):
    config = read_config(QUANTISED)
    weights = load_file(QUANTISED / "model.safetensors")
    save_file(weights, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path, config)
    table = open_engram_table(checkpoint, 1)
    advice.go.set()
    ids = [0, 300, 301, 605]  # 4096 bytes hold 128 rows
    table.prefetch(torch.tensor([ids]))
    # Rows 300 and 301 share a page or lie in neighbours: three ranges; all the scales: one.
    for _ in range(4):
        assert advice.asked.acquire(timeout=30)
    table.close()
    rows = checkpoint.tensors["layers.1.engram.embed.weight"]
    scales = checkpoint.tensors["layers.1.engram.embed.scale"]
    for row in ids:
        assert advice.covers(rows.offset + 32 * row, rows.offset + 32 * (row + 1))
        assert advice.covers(scales.offset + row, scales.offset + row + 1)
    assert len(advice.ranges) == 4


def test_hints_are_dropped_while_earlier_ones_are_pending(advice):
    table = table_of(QUANTISED)
    table.prefetch(torch.tensor([[0]]))
    assert advice.asked.acquire(timeout=30)  # the thread is busy now
    for _ in range(100):
        table.prefetch(torch.tensor([[1]]))
    assert threading.active_count() >= 2
    advice.go.set()
    table.close()
    assert len(advice.ranges) <= 2 * (1 + 8)


def test_closing_ends_the_thread_even_with_hints_pending(advice):
    table = table_of(QUANTISED)
    for _ in range(20):
        table.prefetch(torch.tensor([[0]]))
    assert advice.asked.acquire(timeout=30)
    advice.go.set()
    table.close()
    assert not [t for t in threading.enumerate() if t.name == "engram-prefetch"]
    table.close()


def test_dummy_rows_depend_on_layer_and_row_alone(row_ids):
    config = read_config(TINY)
    table = DummyEngramTable(config, 1)
    found = table.lookup(row_ids)
    assert found.shape == (50, 6 * 32)
    assert torch.equal(found[7:9], DummyEngramTable(config, 1).lookup(row_ids[7:9]))
    assert not torch.equal(found, DummyEngramTable(config, 3).lookup(row_ids))
    assert abs(float(found.mean())) < 0.1
    assert abs(float(found.square().mean()) - 1) < 0.1
    huge = table.lookup(torch.tensor([[384_016_681, 384_016_680]]), dtype=torch.bfloat16)
    assert huge.dtype == torch.bfloat16
    assert not torch.equal(huge[0, :32], huge[0, 32:])
    table.prefetch(row_ids)
    table.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_rows_arrive_on_the_device(quantised_table, row_ids):
    expected = quantised_table.lookup(row_ids, dtype=torch.bfloat16)
    device = torch.device("cuda")
    found = quantised_table.lookup(row_ids, dtype=torch.bfloat16, device=device)
    assert found.device.type == "cuda"
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(quantised_table.lookup(row_ids.to(device), torch.bfloat16), found)
