"""What each token id stands for, as bytes, for decoders that work token by token.

Two families cover nearly all language models. *Byte-level* vocabularies spell every byte as one
character. *Piece* vocabularies (sentencepiece) hold text with a mark for blanks, and single bytes
`<0x0A>` for what has no piece of its own. Any other decoder has no table.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final

from tokenizers import Tokenizer

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PRINTABLE: Final = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
"""Bytes that a byte-level vocabulary writes as the character of the same number. The others follow
in order, from U+0100 on."""


def _byte_of_character() -> dict[str, int]:
    table = {chr(byte): byte for byte in _PRINTABLE}
    others = (byte for byte in range(256) if byte not in set(_PRINTABLE))
    table.update((chr(0x100 + i), byte) for i, byte in enumerate(others))
    return table


@dataclass(frozen=True)
class PieceRules:
    """How a piece decoder turns tokens into text."""

    replacements: tuple[tuple[str, str], ...]
    """(mark, text) substitutions within each token."""
    byte_tokens: bool
    """Whether `<0x..>` tokens stand for bytes."""
    strip_text: str = ""
    """A character of which up to `strip_count` are dropped where the text begins."""
    strip_count: int = 0
    first_drops: str = ""
    """A mark that is dropped, not substituted, in the very first token."""


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids of the tokens that never show in a text."""
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(index for index, token in added.items() if token.special)


def id_to_token(tokenizer: Tokenizer) -> dict[int, str]:
    tokens = {index: token for token, index in tokenizer.get_vocab(with_added_tokens=True).items()}
    # Two names may share an id; what the library answers for the id counts.
    added = tokenizer.get_added_tokens_decoder()
    tokens.update((index, token.content) for index, token in added.items())
    return tokens


def byte_level_table(tokenizer: Tokenizer) -> dict[int, bytes] | None:
    """Id -> bytes for a byte-level vocabulary; None if it is not one."""
    if [step.get("type") for step in _decoder_steps(tokenizer)] != ["ByteLevel"]:
        return None
    codes = _byte_of_character()
    return {index: _byte_level(token, codes) for index, token in id_to_token(tokenizer).items()}


def _byte_level(token: str, codes: dict[str, int]) -> bytes:
    try:
        return bytes([codes[character] for character in token])
    except KeyError:
        # An added token whose text is not in the byte alphabet stands for itself.
        return token.encode("utf-8")


def piece_rules(tokenizer: Tokenizer) -> PieceRules | None:
    """The rules of a piece decoder; None if the decoder has steps that these cannot express."""
    steps = _decoder_steps(tokenizer)
    kinds = [str(step.get("type")) for step in steps]
    if kinds == ["Metaspace"]:
        mark = str(steps[0]["replacement"])
        first = mark if steps[0].get("prepend_scheme") != "never" else ""
        return PieceRules(((mark, " "),), byte_tokens=False, first_drops=first)
    shape = re.fullmatch(r"(?:Replace )*(ByteFallback )?(Fuse )?(Strip )?", " ".join([*kinds, ""]))
    if not steps or shape is None or (shape[3] and not shape[2]):
        return None
    replacements: list[tuple[str, str]] = []
    strip_text, strip_count = "", 0
    for step in steps:
        if step["type"] == "Replace":
            pattern = step["pattern"]
            if not isinstance(pattern, dict) or not pattern.get("String"):
                return None
            replacements.append((str(pattern["String"]), str(step["content"])))
        elif step["type"] == "Strip":
            if step["stop"] != 0 or not isinstance(step["start"], int):
                return None
            strip_text, strip_count = str(step["content"]), step["start"]
    return PieceRules(tuple(replacements), shape[1] is not None, strip_text, strip_count)


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, object]]:
    if tokenizer.decoder is None:
        return []
    # A decoder pickles as its JSON: the whole tokenizer's JSON would take a second.
    state = json.loads(tokenizer.decoder.__getstate__())
    return _flatten(state)


def _flatten(step: dict[str, object]) -> list[dict[str, object]]:
    inner = step.get("decoders")
    if step.get("type") == "Sequence" and isinstance(inner, list):
        return [part for item in inner for part in _flatten(item)]
    return [step]


def piece_text(token: str, rules: PieceRules) -> str | int:
    """A token's text anywhere but at the start; an int is a single byte."""
    text = token
    for mark, replacement in rules.replacements:
        text = text.replace(mark, replacement)
    found = _BYTE_TOKEN.fullmatch(text) if rules.byte_tokens else None
    return text if found is None else int(found[1], 16)
