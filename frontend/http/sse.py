"""Server-sent events as bytes."""

from __future__ import annotations

import msgspec

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_MARK = "\x00text\x00"
_encode = msgspec.json.Encoder().encode
_ENCODED_MARK = _encode(_MARK)
# Legal in JSON, but several clients split lines at them.
_LINE_ENDS = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)


def json_text(text: str) -> bytes:
    """JSON without any character that a client may take for the end of a line."""
    encoded = _encode(text)
    for raw, escaped in _LINE_ENDS:
        encoded = encoded.replace(raw, escaped)
    return encoded


def event(value: object) -> bytes:
    encoded = _encode(value)
    for raw, escaped in _LINE_ENDS:
        encoded = encoded.replace(raw, escaped)
    return b"data: " + encoded + b"\n\n"


class EventTemplate:
    """An event that is the same every time but for one string."""

    __slots__ = ("_head", "_tail")

    MARK = _MARK
    """Stands for the string in the value that the template is made of."""

    def __init__(self, value: object) -> None:
        """`value` holds MARK once."""
        self._head, self._tail = event(value).split(_ENCODED_MARK)

    def fill(self, text: str) -> bytes:
        encoded = _encode(text) if text.isascii() else json_text(text)
        return self._head + encoded + self._tail
