"""Token ids to text, all at once or as they come.

An incremental decoder never emits half a character, and what it emits adds up to what the tokenizer
makes of all ids at once. Special tokens do not show.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import cached_property
from typing import Final, Protocol

from tokenizers import Tokenizer

from frontend.tokenizer.token_table import (
    PieceRules,
    byte_level_table,
    id_to_token,
    piece_rules,
    piece_text,
    special_ids,
)

_REPLACEMENT: Final = "\ufffd"
_LONGEST_BYTE_RUN: Final = 256
"""Byte tokens held back while more may come; see `_PieceDecoder`."""
_SHORTEST_NORMALIZED: Final = 4
"""A normalizer makes a text shorter by this factor at most: no character has more than four bytes, and
three Jamo of nine bytes become one syllable of three."""
_CONTEXT_TOKENS: Final = 6
_LONGEST_WINDOW: Final = 64


class IncrementalDecoder(Protocol):
    """Decodes one sequence of ids. Use one per choice."""

    def push(self, ids: Sequence[int]) -> str:
        """Take more ids; returns the text that is certain by now, maybe none."""
        ...

    def flush(self) -> str:
        """The sequence is over: returns the rest. A cut character becomes U+FFFD."""
        ...


class Detokenizer:
    """Decodes for one tokenizer; cheap to share, holds no state of any sequence."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = special_ids(tokenizer)
        self._bytes = byte_level_table(tokenizer)
        self._rules = piece_rules(tokenizer) if self._bytes is None else None
        self._pieces: dict[int, str | int] = {}
        if self._bytes is not None:
            self._visible = {**self._bytes, **dict.fromkeys(self._special, b"")}
        elif self._rules is not None:
            tokens = id_to_token(tokenizer)
            self._pieces = {i: piece_text(token, self._rules) for i, token in tokens.items()}
            self._visible_pieces = {i: t for i, t in self._pieces.items() if i not in self._special}

    @cached_property
    def max_token_bytes(self) -> int | None:
        """How many bytes of a text one token may stand for; None: where no token stands for a single
        byte, an unknown word of any length may be one token."""
        if self._bytes is not None:
            longest = max(map(len, self._bytes.values()), default=0)
        elif self._rules is not None and self._rules.byte_tokens:
            texts = (piece for piece in self._pieces.values() if isinstance(piece, str))
            longest = max((len(text.encode()) for text in texts), default=0)
        else:
            return None
        if self._tokenizer.normalizer is not None:
            longest *= _SHORTEST_NORMALIZED
        return max(longest, 1)

    def decoder(self) -> IncrementalDecoder:
        if self._bytes is not None:
            return _ByteLevelDecoder(self._visible)
        if self._rules is not None:
            return _PieceDecoder(self._tokenizer, self._visible_pieces, self._rules)
        return _WindowDecoder(self._tokenizer, self._special)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of all `ids`, special tokens included. Unknown ids have no text."""
        # The batch call, unlike `decode`, lets other threads run meanwhile.
        return self._tokenizer.decode_batch([list(ids)], skip_special_tokens=False)[0]

    def token_bytes(self, index: int) -> bytes:
        """The bytes one token stands for in the middle of a text; special tokens show their name.
        Empty for an unknown id."""
        if index in self._special:
            return (self._tokenizer.id_to_token(index) or "").encode("utf-8")
        if self._bytes is not None:
            return self._bytes.get(index, b"")
        piece = self._pieces.get(index)
        if piece is None:
            if self._rules is not None or self._tokenizer.id_to_token(index) is None:
                return b""
            piece = self._tokenizer.decode([index], skip_special_tokens=False)
        return bytes([piece]) if isinstance(piece, int) else piece.encode("utf-8")

    def token_text(self, index: int) -> str:
        """`token_bytes` as text; what is not a whole character becomes U+FFFD."""
        return self.token_bytes(index).decode("utf-8", errors="replace")


class _ByteLevelDecoder:
    """Joins the tokens' bytes and lets the UTF-8 decoder hold back what is not yet a character."""

    __slots__ = ("_decode", "_table")

    def __init__(self, table: dict[int, bytes]) -> None:
        self._table = table
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def push(self, ids: Sequence[int]) -> str:
        table = self._table
        try:
            # Nearly always one: without a list it costs a third less.
            raw = table[ids[0]] if len(ids) == 1 else b"".join([table[index] for index in ids])
        except KeyError:
            raw = b"".join([table.get(index, b"") for index in ids])
        return self._decode(raw)

    def flush(self) -> str:
        return self._decode(b"", True)


class _PieceDecoder:
    """Joins text pieces, and runs of byte tokens.

    The tokenizer's own decoder takes a run of byte tokens as a whole: if it is not valid UTF-8, each
    byte becomes U+FFFD. So a run is held back until it ends. One of more than `_LONGEST_BYTE_RUN`
    bytes, which no sensible text has, is no longer held: its valid characters go out one by one.
    """

    __slots__ = ("_first", "_long", "_rules", "_run", "_strip", "_table", "_tokenizer")

    def __init__(
        self, tokenizer: Tokenizer, table: dict[int, str | int], rules: PieceRules
    ) -> None:
        self._tokenizer = tokenizer
        self._table = table
        self._rules = rules
        self._run = bytearray()
        self._long: codecs.IncrementalDecoder | None = None
        self._strip = rules.strip_count
        self._first = bool(rules.first_drops)

    def push(self, ids: Sequence[int]) -> str:
        texts: list[str] = []
        for index in ids:
            piece = self._table.get(index)
            if piece is None:
                continue
            if isinstance(piece, int):
                self._byte(piece, texts)
                continue
            if self._run or self._long is not None:
                texts.append(self._end_run())
            if self._first:
                self._first = False
                token = self._tokenizer.id_to_token(index) or ""
                piece = piece_text(token.replace(self._rules.first_drops, ""), self._rules)
            texts.append(str(piece))
        return self._stripped("".join(texts))

    def flush(self) -> str:
        return self._stripped(self._end_run())

    def _byte(self, byte: int, texts: list[str]) -> None:
        if self._long is not None:
            texts.append(self._long.decode(bytes([byte])))
            return
        self._run.append(byte)
        if len(self._run) > _LONGEST_BYTE_RUN:
            self._long = codecs.getincrementaldecoder("utf-8")(errors="replace")
            texts.append(self._long.decode(bytes(self._run)))
            self._run.clear()

    def _end_run(self) -> str:
        if self._long is not None:
            text, self._long = self._long.decode(b"", True), None
            return text
        try:
            text = self._run.decode("utf-8")
        except UnicodeDecodeError:
            text = _REPLACEMENT * len(self._run)
        self._run.clear()
        return text

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if not text.startswith(self._rules.strip_text):
                self._strip = 0
                break
            self._strip -= 1
            text = text[len(self._rules.strip_text) :]
        return text


class _WindowDecoder:
    """For any other decoder: decodes the new ids behind a few old ones, and emits what they add."""

    __slots__ = ("_context", "_pending", "_special", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, special: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        self._pending += [index for index in ids if index not in self._special]
        return self._emit(final=False)

    def flush(self) -> str:
        return self._emit(final=True)

    def _emit(self, *, final: bool) -> str:
        if not self._pending:
            return ""
        before = self._tokenizer.decode(self._context)
        window = self._context + self._pending
        after = self._tokenizer.decode(window)
        unsure = after.endswith(_REPLACEMENT) or not after.startswith(before)
        if unsure and not final and len(self._pending) < _LONGEST_WINDOW:
            return ""
        self._context = window[-_CONTEXT_TOKENS:]
        self._pending = []
        return after[len(before) :]
