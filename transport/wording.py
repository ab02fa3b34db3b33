"""What error messages of all packages share: the unit of large sizes, and the gist of a library's error."""

from __future__ import annotations

from typing import Final

GIB: Final = 1 << 30


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, or its type where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
