"""Messages that only workers get."""

from __future__ import annotations

from transport.ids import ProcessName, RequestId
from transport.messages.base import Message
from transport.messages.generate import Generate


class Start(Message, frozen=True):
    """Run one choice. Frame 0: int32 ids of the prompt and of the tokens generated so far (there are
    some when the choice moves here from a lost worker)."""

    request_id: RequestId
    index: int
    frontend: ProcessName
    prompt_len: int
    generate: Generate
    arrival: float
    """CLOCK_MONOTONIC seconds at which the frontend had read the request."""
