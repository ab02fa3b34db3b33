"""Every message that there is."""

from __future__ import annotations

from transport.messages.base import Hello, Refused, Welcome
from transport.messages.control import (
    Answer,
    CacheCommand,
    CommandDone,
    Drain,
    DumpStacks,
    FatalError,
    InstanceStatus,
    PeerLost,
    Query,
    SetLogLevel,
    StateChanged,
    StatusHeld,
    StopInstance,
)
from transport.messages.generate import Cancel, Encode, Encoded, RequestFailed, Throttle, TokenBatch
from transport.messages.tap import TapOpened, Tapped
from transport.messages.telemetry import Snapshot
from transport.messages.to_frontend import Finished, Serving
from transport.messages.to_router import SequenceFailed, Submit, WorkerReady
from transport.messages.to_worker import Start

AnyMessage = (
    Hello
    | Welcome
    | Refused
    | WorkerReady
    | TokenBatch
    | SequenceFailed
    | Submit
    | Cancel
    | Throttle
    | Encode
    | Encoded
    | RequestFailed
    | Start
    | Serving
    | Finished
    | Snapshot
    | StateChanged
    | FatalError
    | InstanceStatus
    | StatusHeld
    | PeerLost
    | Drain
    | Query
    | Answer
    | StopInstance
    | DumpStacks
    | SetLogLevel
    | CacheCommand
    | CommandDone
    | TapOpened
    | Tapped
)
