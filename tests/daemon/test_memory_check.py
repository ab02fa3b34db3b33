"""Weights that cannot fit are refused with both sizes."""

from __future__ import annotations

import json
import struct
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import save_file

from daemon import memory_check
from daemon.config import InstanceConfig
from daemon.errors import ConfigurationError
from daemon.memory_check import available_bytes, check_memory, weight_bytes

GIB = 1 << 30


@pytest.fixture
def memory(monkeypatch, tmp_path):
    """memory(available): such a machine, in no cgroup."""

    def have(available: int) -> None:
        monkeypatch.setattr(
            psutil, "virtual_memory", lambda: SimpleNamespace(available=available)
        )  # fmt: skip
        monkeypatch.setattr(memory_check, "OWN_CGROUPS", tmp_path / "none")

    return have


def sparse_weights(path, size: int, dtype: str = "BF16") -> None:
    """A file whose header promises one tensor, and which has its size without its blocks."""
    header = json.dumps({"w": {"dtype": dtype, "shape": [1], "data_offsets": [0, size]}}).encode()
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


@pytest.mark.parametrize("unified", [True, False])
def test_the_tightest_cgroup_counts(tmp_path, memory, monkeypatch, unified):
    memory(8 * GIB)
    assert available_bytes() == 8 * GIB
    line, root = ("0::/a/b", tmp_path) if unified else ("4:memory:/a/b", tmp_path / "memory")
    limit, usage = (
        ("memory.max", "memory.current")
        if unified
        else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / limit).write_text("max\n" if unified else f"{1 << 62}\n")
    (root / "a" / "b" / usage).write_text("5\n")
    (root / "a" / limit).write_text(f"{3 * GIB}\n")
    (root / "a" / usage).write_text(f"{2 * GIB}\n")
    (root / "a" / "memory.stat").write_text(f"anon 7\ninactive_file {GIB}\nactive_file 0\n")
    (tmp_path / "own").write_text(f"1:name=systemd:/\n{line}\n")
    monkeypatch.setattr(memory_check, "CGROUPS", tmp_path)
    monkeypatch.setattr(memory_check, "OWN_CGROUPS", tmp_path / "own")
    assert available_bytes() == 2 * GIB
