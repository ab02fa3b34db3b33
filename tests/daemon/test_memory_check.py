"""Weights that cannot fit are refused with both sizes."""

from __future__ import annotations

import json
import struct
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import save_file

from daemon.configuration.config import InstanceConfig
from daemon.errors import ConfigurationError
from daemon.instance.memory_check import check_memory, weight_bytes
from transport.wording import GIB
from workers.hardware import host_memory


@pytest.fixture
def memory(monkeypatch, tmp_path):
    """memory(available): such a machine, in no cgroup."""

    def have(available: int) -> None:
        monkeypatch.setattr(
            psutil, "virtual_memory", lambda: SimpleNamespace(available=available)
        )  # fmt: skip
        monkeypatch.setattr(host_memory, "OWN_CGROUPS", tmp_path / "none")

    return have


def sparse_weights(path, size: int, dtype: str = "BF16", name: str = "w") -> None:
    """A file whose header promises one tensor, and which has its size without its blocks."""
    shape = [size // (2 if dtype == "BF16" else 1)]
    header = json.dumps(
        {name: {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}
    ).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)


@pytest.mark.parametrize(("float_bytes", "wanted"), [(4, 480), (2, 280)])
def test_floats_are_counted_in_the_type_they_will_have(tmp_path, float_bytes, wanted):
    path = tmp_path / "model.safetensors"
    tensors = {
        "a": torch.zeros(30, dtype=torch.bfloat16), "b": torch.zeros(70), "c": torch.zeros(80).byte(),
    }  # fmt: skip
    save_file(tensors, path, metadata={"format": "pt"})
    assert weight_bytes(path, float_bytes) == wanted


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs", b"\xff" * 100])
def test_a_broken_file_counts_with_its_size(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert weight_bytes(path, 4) == len(content)


def test_offsets_beyond_the_file_are_not_believed(tmp_path):
    path = tmp_path / "model.safetensors"
    sparse_weights(path, 1 << 40)
    with path.open("r+b") as file:
        file.truncate(1000)
    assert weight_bytes(path, 4) == 1000


def test_all_files_of_all_workers_must_fit(tmp_path, memory):
    for name in ("a.safetensors", "b.safetensors"):
        sparse_weights(tmp_path / name, GIB)
    memory(8 * GIB)
    check_memory(InstanceConfig(dp=2), "cpu", tmp_path)
    check_memory(InstanceConfig(dp=4, dtype="bfloat16"), "cpu", tmp_path)
    check_memory(InstanceConfig(dp=9), "nvidia", tmp_path)
    with pytest.raises(ConfigurationError, match=r"need 12\.0 GiB.*3 workers.*8\.0 GiB.*--dp"):
        check_memory(InstanceConfig(dp=3), "cpu", tmp_path)


def test_tables_that_stay_in_their_file_need_no_memory(tmp_path, memory):
    sparse_weights(tmp_path / "a.safetensors", GIB)
    for part, dtype in (("weight", "F8_E4M3"), ("scale", "F8_E8M0")):
        file = tmp_path / f"{part}.safetensors"
        sparse_weights(file, 100 * GIB, dtype, f"layers.1.engram.embed.{part}")
    memory(3 * GIB)
    check_memory(InstanceConfig(), "cpu", tmp_path)
