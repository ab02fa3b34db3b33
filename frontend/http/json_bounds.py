"""What the JSON of a body may hold, found out without decoding it: a few megabytes of brackets would
decode to gigabytes of objects, and a number has no length of its own."""

from __future__ import annotations

import re
from typing import Final

from frontend.errors import bad_request

MAX_ELEMENTS: Final = 2_000_000
"""Keys, elements, objects and arrays together: the ids of a prompt of a million tokens twice over."""
MAX_DIGITS: Final = 128
"""Digits in a row. A double needs 17."""

_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_STRUCTURE: Final = b",:[{"
_ALL_BUT_STRUCTURE: Final = bytes(set(range(256)) - set(_STRUCTURE))
_DIGITS_TO_ZEROS: Final = bytes.maketrans(b"123456789", b"0" * 9)
_TOO_LONG: Final = b"0" * (MAX_DIGITS + 1)


def check_bounds(body: bytes) -> None:
    """
    Raises:
        ApiError: 400; too many keys and elements, or too long a number.
    """
    # Texts are looked into only where they could be what is too much.
    if not _has_many_elements(body) and not _has_long_number(body):
        return
    structure, strings = _STRING.subn(b"", body, MAX_ELEMENTS)
    if strings == MAX_ELEMENTS or _has_many_elements(structure):
        raise bad_request(f"The body's JSON has more than {MAX_ELEMENTS} keys and elements.")
    if _has_long_number(structure):
        raise bad_request(f"The body's JSON has a number of more than {MAX_DIGITS} digits.")


def _has_many_elements(text: bytes) -> bool:
    return len(text) > MAX_ELEMENTS and (
        len(text.translate(None, _ALL_BUT_STRUCTURE)) > MAX_ELEMENTS
    )


def _has_long_number(text: bytes) -> bool:
    return _TOO_LONG in text.translate(_DIGITS_TO_ZEROS)
