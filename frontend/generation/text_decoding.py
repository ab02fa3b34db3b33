"""What the frontend asks of a tokenizer: turning ids back into text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TextDecoder(Protocol):
    """Decodes the tokens of one choice as they come; never yields half a character."""

    def push(self, ids: Sequence[int], /) -> str: ...

    def flush(self) -> str: ...


class TokenTexts(Protocol):
    """Text of single tokens and of whole sequences."""

    @property
    def max_token_bytes(self) -> int | None:
        """How much of a client's text one token may stand for; None: that is not known."""
        ...

    def decoder(self) -> TextDecoder: ...

    def token_text(self, token_id: int, /) -> str: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...

    def decode(self, ids: Sequence[int], /) -> str: ...
