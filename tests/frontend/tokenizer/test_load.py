"""Reading a checkpoint's tokenizer files, whole and broken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from frontend.tokenizer.load import load_tokenizer
from transport.model_files import ModelError

WriteCheckpoint = Callable[..., Path]


def templates(folder: Path) -> dict[str, str]:
    return {name: source.text for name, source in load_tokenizer(folder).chat_templates.items()}


def test_default_model(smollm2_dir: Path) -> None:
    files = load_tokenizer(smollm2_dir)
    assert files.special_tokens["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in files.chat_templates["default"].text


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("T", {"default": "T"}),
        (None, {}),
        (
            [{"name": "default", "template": "T"}, {"name": "tool_use", "template": "U"}],
            {"default": "T", "tool_use": "U"},
        ),
        ({"default": "T", "rag": "R"}, {"default": "T", "rag": "R"}),
    ],
)
def test_template_forms(
    write_checkpoint: WriteCheckpoint, value: object, expected: dict[str, str]
) -> None:
    assert templates(write_checkpoint("byte_level", value)) == expected


def test_template_files_win_over_the_configuration(write_checkpoint: WriteCheckpoint) -> None:
    folder = write_checkpoint("byte_level", "from config")
    (folder / "chat_template.json").write_text('{"chat_template": "from json"}')
    assert templates(folder) == {"default": "from json"}
    (folder / "chat_template.jinja").write_text("from jinja")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert templates(folder) == {"default": "from jinja", "tool_use": "tools"}


def test_special_tokens_from_both_files_and_forms(write_checkpoint: WriteCheckpoint) -> None:
    folder = write_checkpoint("byte_level", bos_token=None, eos_token={"content": "<|im_end|>"})
    (folder / "special_tokens_map.json").write_text(
        '{"bos_token": "<|endoftext|>", "eos_token": "older"}'
    )
    assert load_tokenizer(folder).special_tokens == {
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
    }


def test_truncation_and_padding_are_switched_off(write_checkpoint: WriteCheckpoint) -> None:
    folder = write_checkpoint("byte_level")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(folder / "tokenizer.json"))
    loaded = load_tokenizer(folder).tokenizer
    assert len(loaded.encode("x y z x y z").ids) == 11


def test_tokens_that_only_the_configuration_declares(write_checkpoint: WriteCheckpoint) -> None:
    size = load_tokenizer(write_checkpoint("byte_level")).tokenizer.get_vocab_size()
    declared = {
        str(size): {"content": "<|new|>", "special": True},
        str(size + 40): {"content": "<|gap|>", "special": True},
        "nonsense": {"content": "<|odd|>"},
        "7": "not an object",
    }
    folder = write_checkpoint("byte_level", added_tokens_decoder=declared, eos_token="hello")
    tokenizer = load_tokenizer(folder).tokenizer
    assert tokenizer.encode("<|new|>").ids == [size]
    assert tokenizer.token_to_id("<|gap|>") is None
    added = tokenizer.get_added_tokens_decoder()
    assert added[size].special
    assert added[tokenizer.token_to_id("hello")].special
    assert tokenizer.get_vocab_size() == size + 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"{}", "tokenizer.json is not a usable tokenizer"),
        ("tokenizer.json", b"{", "tokenizer.json is not a usable tokenizer"),
        ("tokenizer.json", b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        ("tokenizer.json", b"\xff\xfe", "tokenizer.json is not UTF-8"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", b"[]", "tokenizer_config.json holds no JSON object"),
        ("tokenizer_config.json", b'{"chat_template": 7}', "chat_template that is not text"),
        ("tokenizer_config.json", b'{"chat_template": ["a"]}', "things not objects"),
        ("tokenizer_config.json", b'{"chat_template": [{}]}', "without a name or a text"),
        ("special_tokens_map.json", b"nope", "special_tokens_map.json is not valid JSON"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja is not UTF-8"),
    ],
)
def test_broken_files_are_named(
    write_checkpoint: WriteCheckpoint, name: str, content: bytes, message: str
) -> None:
    folder = write_checkpoint("byte_level")
    (folder / name).write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model directory .* does not exist"):
        load_tokenizer(tmp_path / "absent")


def test_directory_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_vocabulary_files_instead_of_tokenizer_json(
    tmp_path: Path, tokenizers_by_family: dict[str, Tokenizer]
) -> None:
    original = tokenizers_by_family["byte_level"]
    original.model.save(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    loaded = load_tokenizer(tmp_path).tokenizer
    assert loaded.encode("hello world").ids == original.encode("hello world").ids
