"""Find stop strings in a text that comes in pieces, without ever showing a part of one."""

from __future__ import annotations


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

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next piece; returns what may be shown, and whether a stop string was met."""
        text = self._held + text
        cut = self._first_match(text)
        if cut is not None:
            self._held = ""
            return text[:cut], True
        keep = self._tail_start(text)
        self._held = text[keep:]
        return text[:keep], False

    def flush(self) -> str:
        """The text ended: what was held back is part of it."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> int | None:
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best = (start + len(stop), start)
        return None if best is None else best[1]

    def _tail_start(self, text: str) -> int:
        """Where the longest tail starts that is a proper prefix of a stop string."""
        first_characters = self._first_characters
        for start, character in enumerate(text):
            if character in first_characters:
                tail = text[start:]
                if any(stop.startswith(tail) for stop in self._stops):
                    return start
        return len(text)
