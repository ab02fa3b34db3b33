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
from daemon.instance.memory_check import weight_bytes
from daemon.instance.model_check import check_model
from transport.wording import GIB
from workers.hardware import host_memory
from workers.models.safetensors_header import read_header


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
    assert weight_bytes(read_header(path), float_bytes) == wanted


def model(folder, shards):
    """A directory whose index names `shards`, besides what lies in it already."""
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    index = {"weight_map": {shard: shard for shard in shards}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_all_files_of_all_workers_must_fit(tmp_path, memory):
    shards = ["a.safetensors", "b.safetensors"]
    for name in shards:
        sparse_weights(tmp_path / name, GIB)
    model(tmp_path, shards)
    memory(8 * GIB)
    check_model(InstanceConfig(dp=2), "cpu", tmp_path)
    check_model(InstanceConfig(dp=4, dtype="bfloat16"), "cpu", tmp_path)
    check_model(InstanceConfig(dp=9), "nvidia", tmp_path)
    with pytest.raises(ConfigurationError, match=r"need 12\.0 GiB.*3 workers.*8\.0 GiB.*--dp"):
        check_model(InstanceConfig(dp=3), "cpu", tmp_path)


def test_tables_that_stay_in_their_file_need_no_memory(tmp_path, memory):
    shards = ["a.safetensors"]
    sparse_weights(tmp_path / "a.safetensors", GIB)
    for part, dtype in (("weight", "F8_E4M3"), ("scale", "F8_E8M0")):
        shards.append(f"{part}.safetensors")
        sparse_weights(tmp_path / shards[-1], 100 * GIB, dtype, f"layers.1.engram.embed.{part}")
    memory(3 * GIB)
    check_model(InstanceConfig(), "cpu", model(tmp_path, shards))


def test_what_is_not_loaded_is_not_counted(tmp_path, memory):
    sparse_weights(tmp_path / "a.safetensors", GIB)
    sparse_weights(tmp_path / "consolidated.safetensors", 60 * GIB)
    with (tmp_path / "pytorch_model.bin").open("wb") as file:
        file.truncate(60 * GIB)
    memory(3 * GIB)
    check_model(InstanceConfig(), "cpu", model(tmp_path, ["a.safetensors"]))


def test_one_whole_file_is_what_is_loaded_as_transformers_does(tmp_path, memory):
    sparse_weights(tmp_path / "model.safetensors", GIB)
    sparse_weights(tmp_path / "a.safetensors", 60 * GIB)
    memory(3 * GIB)
    check_model(InstanceConfig(), "cpu", model(tmp_path, ["a.safetensors"]))
