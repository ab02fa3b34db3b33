"""Models that are broken or hostile: one sentence names the file, before any process starts."""

from __future__ import annotations

import json
import os
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from daemon.configuration.config import InstanceConfig
from daemon.errors import EXIT_USAGE, ConfigurationError
from daemon.instance.model_check import check_model
from transport.model_files import MAX_TEXT_BYTES

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
DEEP = b"[" * 100_000
INDEX = "model.safetensors.index.json"
JSON_FILES = (
    "config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.json",
)  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path):
    """Two shards and their index."""
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    for name in "ab":
        save_file({name: np.zeros(3, np.float32)}, tmp_path / f"{name}.safetensors")
    write_index(tmp_path, {"a": "a.safetensors", "b": "b.safetensors"})
    return tmp_path


def write_index(folder, weight_map) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refusal(folder, **options: object) -> str:
    with pytest.raises(ConfigurationError) as caught:
        check_model(InstanceConfig(**options), "cpu", folder)
    assert caught.value.exit_code == EXIT_USAGE
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith(".")
    assert len(text) < 500
    return text


def test_a_whole_checkpoint_passes(checkpoint):
    check_model(InstanceConfig(), "cpu", checkpoint)


@pytest.mark.parametrize("name", [*JSON_FILES, INDEX])
@pytest.mark.parametrize(
    ("content", "told"),
    [
        (DEEP, "nested deeper"),
        (b'{"a":' * 100_000, "nested deeper"),
        (b"[]", "no JSON object"),
        (b"null", "no JSON object"),
        (b'"x"', "no JSON object"),
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (LFS, "git lfs pull"),
    ],
)
def test_a_file_that_is_no_object_is_named(checkpoint, name, content, told):
    (checkpoint / name).write_bytes(content)
    sentence = refusal(checkpoint)
    assert str(checkpoint / name) in sentence
    assert told in sentence


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_file_of_any_size_is_not_read_into_memory(checkpoint, name):
    with (checkpoint / name).open("wb") as file:
        file.truncate(MAX_TEXT_BYTES + 1)
    assert f"{checkpoint / name} has {MAX_TEXT_BYTES + 1} bytes" in refusal(checkpoint)


def test_what_is_no_regular_file_is_not_waited_for(checkpoint):
    os.mkfifo(checkpoint / "generation_config.json")
    assert "generation_config.json is no regular file" in refusal(checkpoint)


@pytest.mark.parametrize(
    ("size", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", -1),
        ("num_hidden_layers", 0),
        ("n_layer", 10**9),
        ("hidden_size", 10**15),
        ("hidden_size", -64),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 10**100),
        ("intermediate_size", [64, -1]),
        ("vocab_size", -5),
        ("max_position_embeddings", 0),
        ("num_experts", -1),
    ],
)
def test_a_size_that_no_model_has_is_named(checkpoint, size, value):
    for config, name in (
        ({size: value}, size),
        ({"text_config": {size: value}}, f"text_config.{size}"),
    ):
        (checkpoint / "config.json").write_text(json.dumps(config))
        sentence = refusal(checkpoint, engine="fake")
        assert f"{checkpoint / 'config.json'} has {name} " in sentence


def test_what_models_leave_out_is_no_wrong_size(checkpoint):
    config = {
        "n_inner": None, "num_experts": 0, "vision_config": {"num_hidden_layers": 0},
        "intermediate_size": [64, 128], "vocab_size": 1, "num_hidden_layers": 1,
    }  # fmt: skip
    (checkpoint / "config.json").write_text(json.dumps(config))
    check_model(InstanceConfig(), "cpu", checkpoint)


@pytest.mark.parametrize(
    ("weight_map", "told"),
    [
        ({"a": "../../../etc/passwd"}, "'../../../etc/passwd'"),
        ({"a": "/etc/passwd"}, "'/etc/passwd'"),
        ({"a": "passwd"}, "'passwd'"),
        ({"a": 7}, "names 7"),
        ({"a": ["a.safetensors"]}, "which is no"),
        ({"a": None}, "names None"),
        ({}, "no weight_map"),
        ([], "no weight_map"),
        ("a.safetensors", "no weight_map"),
    ],
)
def test_an_index_that_names_something_else(checkpoint, weight_map, told):
    write_index(checkpoint, weight_map)
    sentence = refusal(checkpoint)
    assert str(checkpoint / INDEX) in sentence
    assert told in sentence


def test_a_missing_shard_is_named(checkpoint):
    (checkpoint / "b.safetensors").unlink()
    assert "lacks 1 of 2 shards, the first one is b.safetensors" in refusal(checkpoint)


def test_weights_of_another_format_are_no_weights(checkpoint):
    for file in (*checkpoint.glob("*.safetensors"), checkpoint / INDEX):
        file.unlink()
    (checkpoint / "pytorch_model.bin").touch()
    assert "no weights" in (sentence := refusal(checkpoint))
    assert "pytorch_model.bin" in sentence
    check_model(InstanceConfig(load_format="dummy"), "cpu", checkpoint)


def header(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def entry(**changes: object) -> bytes:
    values = {"dtype": "F32", "shape": [3], "data_offsets": [0, 12], **changes}
    return header(json.dumps({"b": values}).encode()) + bytes(12)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (LFS, "git lfs pull"),
        (b"", "truncated"),
        (b"\xff" * 100, "truncated"),
        (entry()[:-4], "truncated"),
        (entry()[:20], "truncated"),
        (entry() + b"more", "damaged"),
        (header(DEEP), "damaged"),
        (header(b"[]"), "damaged"),
        (header(b'{"b": 7}'), "damaged"),
        (entry(data_offsets=[-12, 0]), "damaged"),
        (entry(data_offsets=[12, 0]), "damaged"),
        (entry(data_offsets=[0]), "damaged"),
        (entry(data_offsets=["0", {}]), "damaged"),
        (entry(data_offsets=[0, float("inf")]), "damaged"),
        (entry(shape=[-3]), "damaged"),
        (entry(shape=[10**30]), "damaged"),
        (entry(shape=None), "damaged"),
    ],
)
def test_a_broken_shard_is_named(checkpoint, content, told):
    (checkpoint / "b.safetensors").write_bytes(content)
    sentence = refusal(checkpoint)
    assert str(checkpoint / "b.safetensors") in sentence
    assert told in sentence


@pytest.mark.parametrize("template", [7, ["a"], [{}], {"default": 1}])
def test_a_chat_template_that_is_no_text_is_named(checkpoint, template):
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert str(checkpoint / "tokenizer_config.json") in refusal(checkpoint, engine="fake")
