"""Reads server-sent events as OpenAI's API sends them: a line of `data:` an event, `[DONE]` at the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

DATA: Final = b"data: "
DONE: Final = b"[DONE]"


class BrokenStream(Exception):
    """A stream ended without `[DONE]`, or went on after it."""


def event_data(lines: Iterable[bytes]) -> Iterator[bytes]:
    """What each event holds, up to `[DONE]`. Takes no line after that.

    Raises:
        BrokenStream: the lines end before.
    """
    for line in lines:
        if line.startswith(DATA):
            data = line[len(DATA) :].rstrip()
            if data == DONE:
                return
            yield data
    raise BrokenStream("the stream ended without [DONE]")


def whole_stream(body: bytes) -> list[bytes]:
    """What each event of a complete body holds.

    Raises:
        BrokenStream: it does not end with `[DONE]`.
    """
    lines = iter(body.splitlines())
    events = list(event_data(lines))
    if any(lines):
        raise BrokenStream("the stream goes on after [DONE]")
    return events
