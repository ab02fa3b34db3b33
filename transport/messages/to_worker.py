"""Messages from the router to workers."""

from __future__ import annotations

from typing import Final

from msgspec.msgpack import Decoder

from transport.ids import ProcessName, RequestId
from transport.messages.base import HelloAnswer, Message
from transport.messages.generate import Cancel, Generate, Throttle


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


ToWorker = Start | Cancel | Throttle
TO_WORKER: Final[Decoder[HelloAnswer | ToWorker]] = Decoder(HelloAnswer | ToWorker)
