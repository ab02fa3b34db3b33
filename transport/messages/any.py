"""Every message, for those who look on: the tap's reader and the documentation."""

from __future__ import annotations

from typing import Final

from msgspec.msgpack import Decoder

from transport.messages.base import HelloAnswer
from transport.messages.from_daemon import (
    FrontendNotice,
    RouterNotice,
    ToClient,
    TokenizerNotice,
    ToProcess,
    WorkerNotice,
)
from transport.messages.tap import ToTapper
from transport.messages.telemetry import Snapshot
from transport.messages.to_daemon import ToDaemon
from transport.messages.to_frontend import ToFrontend
from transport.messages.to_router import ToRouter
from transport.messages.to_tokenizer import ToTokenizer
from transport.messages.to_worker import ToWorker

AnyMessage = (
    ToRouter
    | HelloAnswer
    | ToTokenizer
    | ToWorker
    | ToFrontend
    | ToDaemon
    | Snapshot
    | ToProcess
    | RouterNotice
    | WorkerNotice
    | TokenizerNotice
    | FrontendNotice
    | ToClient
    | ToTapper
)
ANY_MESSAGE: Final[Decoder[AnyMessage]] = Decoder(AnyMessage)
