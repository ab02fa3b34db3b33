"""Messages that only frontends get."""

from __future__ import annotations

from transport.ids import DpRank, RequestId
from transport.messages.base import Message
from transport.messages.generate import ModelInfo, StageTimes


class Serving(Message, frozen=True):
    """What the router serves; sent after `Welcome` once known, and whenever it changes."""

    model: ModelInfo


class Finished(Message, frozen=True):
    """The router has closed its record of a request; follows its last `TokenBatch`."""

    request_id: RequestId
    stages: StageTimes
    rank: DpRank
