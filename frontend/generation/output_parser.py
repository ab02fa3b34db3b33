"""Where the text of a choice is taken apart into answer, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from frontend.generation.deltas import Delta, Finish, FinishReason, Text


class OutputParser(Protocol):
    """Reads the text of one choice as it comes in pieces. Stop strings have been cut off."""

    def push(self, text: str, /) -> Sequence[Delta]:
        """`text` is not empty. Returns what is certain by now."""
        ...

    def finish(self, reason: FinishReason, /) -> Sequence[Delta]:
        """Returns what was held back, and a `Finish` as the last delta."""
        ...


class PlainText:
    """All of the text is the answer."""

    __slots__ = ()

    def push(self, text: str, /) -> Sequence[Delta]:
        return (Text(text),)

    def finish(self, reason: FinishReason, /) -> Sequence[Delta]:
        return (Finish(reason),)
