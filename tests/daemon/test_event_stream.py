"""Events are told apart however a stream was written, and one that was cut off is never taken for whole."""

from __future__ import annotations

import pytest

from daemon.cli.check.event_stream import BrokenStream, event_data, whole_stream

WHOLE = b'data: {"a": 1}\n\n: a comment\n\ndata: {"b": "data: x"}\r\n\r\ndata: [DONE]\n\n'
EVENTS = [b'{"a": 1}', b'{"b": "data: x"}']


def test_a_whole_stream_is_its_events():
    assert whole_stream(WHOLE) == EVENTS
    assert whole_stream(b"data: [DONE]") == []


def test_nothing_is_taken_after_the_end():
    lines = iter([*WHOLE.splitlines(keepends=True), b"the next answer"])
    assert list(event_data(lines)) == EVENTS
    assert list(lines) == [b"\n", b"the next answer"]


@pytest.mark.parametrize("body", [b"", b'data: {"a": 1}\n\n', WHOLE + WHOLE, WHOLE + b"x"])
def test_what_does_not_end_with_done_is_broken(body):
    with pytest.raises(BrokenStream):
        whole_stream(body)


def test_the_events_before_a_break_are_given():
    found = []
    with pytest.raises(BrokenStream, match="without"):
        found.extend(event_data(WHOLE.splitlines()[:-2]))
    assert found == EVENTS
