"""Find stop strings in a text that comes in pieces, without ever showing a part of one."""

from __future__ import annotations

import msgspec


class StopRule(msgspec.Struct, frozen=True):
    """The stop strings of a request."""

    strings: tuple[str, ...] = ()
    min_tokens: int = 0
    """What the first so many tokens complete is no stop string, but text."""


class StopScanner:
    """Cuts a text at its first stop string.

    The match that is complete first counts; of several that are complete at the same character,
    the longest. So the cut does not depend on how the text is split into pieces. Held back is only
    the longest tail that could still grow into a stop string.
    """

    __slots__ = ("_first_characters", "_held", "_stops")

    def __init__(self, stops: tuple[str, ...]) -> None:
        """`stops` are non-empty strings."""
        self._stops = stops
        self._first_characters = frozenset(stop[0] for stop in stops)
        self._held = ""

    def push(self, text: str, may_stop: bool = True) -> tuple[str, bool]:
        """Returns what may be shown, and whether a stop string was met.

        If not `may_stop`, a stop string that ends in this piece is text like any other; one that
        only begins in it may still be met later.
        """
        seen = len(self._held)
        text = self._held + text
        cut = self._first_match(text, seen) if may_stop else None
        if cut is not None:
            self._held = ""
            return text[:cut], True
        keep = self._tail_start(text)
        self._held = text[keep:]
        return text[:keep], False

    def flush(self) -> str:
        """At the end of the text; returns what was held back."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str, seen: int) -> int | None:
        """Where the first stop string starts that does not lie within the first `seen` characters."""
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = text.find(stop, max(seen - len(stop) + 1, 0))
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best = (start + len(stop), start)
        return None if best is None else best[1]

    def _tail_start(self, text: str) -> int:
        """Where the longest tail starts that is a proper prefix of a stop string."""
        first_characters = self._first_characters
        for start, character in enumerate(text):
            if character in first_characters:
                tail = text[start:]
                if any(len(tail) < len(stop) and stop.startswith(tail) for stop in self._stops):
                    return start
        return len(text)
