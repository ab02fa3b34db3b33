"""Small tokenizers of the families that checkpoints use, and a checkpoint directory writer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def special(text: str) -> AddedToken:
    return AddedToken(text, normalized=False, special=True)


def make_byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "hello"), ("Ã", "©")]
    merges += [("ð", "Ł"), ("i", "m"), ("<", "|"), ("|", ">")]
    words = SPECIALS + alphabet + [left + right for left, right in merges]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([special(text) for text in SPECIALS])
    tokenizer.add_tokens(
        [
            AddedToken(t, normalized=False)
            for t in ("<think>", "</think>", "<tool_call>", "é", "a b")
        ]
    )
    tokenizer.add_tokens([AddedToken("\n\n\n", normalized=False)])
    return tokenizer


def piece_vocab() -> tuple[dict[str, int], list[tuple[str, str]]]:
    merges = [("▁", "a"), ("b", "c"), ("▁a", "bc"), ("s", ">"), ("<", "s>"), ("▁", "▁")]
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", *"abcs<>/|[]ISNT_:imdenrtu", "é", *(left + right for left, right in merges)]
    words = list(dict.fromkeys(words))
    return {word: i for i, word in enumerate(words)}, merges


def make_llama2() -> Tokenizer:
    vocab, merges = piece_vocab()
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([special(text) for text in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def make_gemma() -> Tokenizer:
    vocab, merges = piece_vocab()
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([special(text) for text in ("<unk>", "<s>", "</s>", "<|turn|>")])
    tokenizer.add_tokens([AddedToken("▁▁▁", normalized=False)])
    return tokenizer


def make_unigram() -> Tokenizer:
    pieces = ["<unk>", "</s>", "▁", *"abcdehilmnorstu<>/|", "▁hello", "ll", "▁▁"]
    tokenizer = Tokenizer(models.Unigram([(p, -float(i)) for i, p in enumerate(pieces)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens([special("<unk>"), special("</s>")])
    return tokenizer


def make_wordpiece() -> Tokenizer:
    words = ["[UNK]", "[SEP]", "hello", "##ing", "##s", "world", ".", ",", "do", "n't"]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([special("[SEP]")])
    return tokenizer


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": make_byte_level,
    "llama2": make_llama2,
    "gemma": make_gemma,
    "unigram": make_unigram,
    "wordpiece": make_wordpiece,
}


@pytest.fixture(scope="session")
def tokenizers_by_family() -> dict[str, Tokenizer]:
    return {name: make() for name, make in MAKERS.items()}


WriteCheckpoint = Callable[..., Path]


@pytest.fixture
def write_checkpoint(tmp_path: Path, tokenizers_by_family: dict[str, Tokenizer]) -> WriteCheckpoint:
    """write_checkpoint(family, chat_template=None, **tokenizer_config) -> directory."""

    def write(family: str, chat_template: object = None, **config: object) -> Path:
        folder = tmp_path / f"checkpoint-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        tokenizers_by_family[family].save(str(folder / "tokenizer.json"))
        if chat_template is not None:
            config["chat_template"] = chat_template
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return folder

    return write


@pytest.fixture
def chatml() -> str:
    return CHATML
