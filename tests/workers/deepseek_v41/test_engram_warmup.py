"""The tables of Engram are read once per host, in the background."""

import fcntl
import logging
import os
import shutil
from pathlib import Path

import pytest

from workers.models.deepseek_v41.config.config_file import read_config
from workers.models.deepseek_v41.engram import warmup as engram_warmup
from workers.models.deepseek_v41.engram.table import stored_tensors
from workers.models.deepseek_v41.engram.warmup import EngramWarmup
from workers.models.deepseek_v41.weights.checkpoint import open_checkpoint

QUANTISED = Path(__file__).parents[2] / "data" / "v41_tiny_quant"
BYTES = (606 + 796) * 33
"""Rows and scales of the tables of two layers."""


@pytest.fixture
def model_dir(tmp_path) -> Path:
    shutil.copy(QUANTISED / "model.safetensors", tmp_path)
    return tmp_path


@pytest.fixture
def tensors(model_dir):
    config = read_config(QUANTISED)
    return stored_tensors(open_checkpoint(model_dir, config), config.engram_layer_ids)


class Reads:
    """Counts what is read through `os.pread`."""

    def __init__(self, monkeypatch) -> None:
        self.spans: list[tuple[int, int]] = []
        self._read = os.pread
        monkeypatch.setattr(os, "pread", self)

    def __call__(self, descriptor: int, length: int, offset: int) -> bytes:
        self.spans.append((offset, length))
        return self._read(descriptor, length, offset)


@pytest.fixture
def reads(monkeypatch) -> Reads:
    return Reads(monkeypatch)


def test_every_byte_of_all_tables_is_read_once(tensors, reads, monkeypatch):
    monkeypatch.setattr(engram_warmup, "_READ_BYTES", 1000)
    warmup = EngramWarmup(tensors)
    assert warmup.wait(30)
    wanted = [at for tensor in tensors for at in range(tensor.offset, tensor.offset + tensor.size)]
    assert len(wanted) == BYTES
    assert sorted(
        at for offset, length in reads.spans for at in range(offset, offset + length)
    ) == sorted(wanted)
    assert warmup.complete
    warmup.close()


def test_one_process_of_a_host_reads_for_all(tensors, reads):
    with open(tensors[0].file, "rb") as another:
        fcntl.flock(another, fcntl.LOCK_EX)
        other = EngramWarmup(tensors)
        assert other.wait(30) and not other.complete
        assert reads.spans == []
    # It has ended: the next one looks after what it may have left.
    assert EngramWarmup(tensors).wait(30)
    assert sum(length for _, length in reads.spans) == BYTES


def test_tables_larger_than_memory_are_left_on_the_disk(tensors, reads, monkeypatch, caplog):
    monkeypatch.setattr(engram_warmup, "available_host_memory", lambda: BYTES - 1)
    warmup = EngramWarmup(tensors)
    assert warmup.wait(0) and not warmup.complete
    warmup.close()
    assert reads.spans == []
    assert "look-ups will often wait for the disk" in caplog.text


def test_closing_stops_it(tensors, monkeypatch):
    monkeypatch.setattr(engram_warmup, "_READ_BYTES", 1)
    warmup = EngramWarmup(tensors)
    warmup.close()
    assert warmup.wait(0) and not warmup.complete
    warmup.close()


def test_a_file_that_shrinks_meanwhile_is_told(tensors, model_dir, caplog):
    os.truncate(model_dir / "model.safetensors", 100_000)
    with caplog.at_level(logging.WARNING):
        assert EngramWarmup(tensors).wait(30)
    assert "became shorter" in caplog.text
