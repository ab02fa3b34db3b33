"""Messages from the router to frontends."""

from __future__ import annotations

from typing import Final

from msgspec.msgpack import Decoder

from transport.ids import DpRank, RequestId
from transport.messages.base import HelloAnswer, Message
from transport.messages.generate import Encoded, ModelInfo, RequestFailed, StageTimes, TokenBatch


class Serving(Message, frozen=True):
    """What the router serves; sent after `Welcome` once known, and whenever it changes."""

    model: ModelInfo


class Finished(Message, frozen=True):
    """The router has closed its record of a request; follows its last `TokenBatch`."""

    request_id: RequestId
    stages: StageTimes
    rank: DpRank


ToFrontend = TokenBatch | Finished | RequestFailed | Encoded | Serving
TO_FRONTEND: Final[Decoder[HelloAnswer | ToFrontend]] = Decoder(HelloAnswer | ToFrontend)
