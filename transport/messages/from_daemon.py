"""Messages from the daemon to its processes and to clients."""

from __future__ import annotations

from typing import Final, Literal

import msgspec
from msgspec.msgpack import Decoder

from transport.ids import ProcessName
from transport.messages.base import HelloAnswer, Message
from transport.messages.control import CacheCommand, DumpStacks, SetLogLevel

InstanceState = Literal["starting", "ready", "degraded", "draining"]


class ApiKeys(msgspec.Struct, frozen=True):
    """What opens the API, and what opens its administration paths. None of a kind: no key is asked
    for there, or where there are only users' keys, one of those opens everything."""

    users: tuple[bytes, ...] = ()
    admins: tuple[bytes, ...] = ()

    def __repr__(self) -> str:
        return f"ApiKeys({len(self.users)} for users, {len(self.admins)} for administration)"


NO_KEYS: Final = ApiKeys()


class InstanceStatus(Message, frozen=True):
    """May requests come in, and with which keys? Answered with `StatusHeld`."""

    state: InstanceState
    reason: str = ""
    serial: int = 0
    """0: nobody waits for the answer."""
    keys: ApiKeys = NO_KEYS


class PeerLost(Message, frozen=True):
    """A process is gone. The router gives its work to others; if the router itself is gone, workers
    and tokenizers drop its work and join the new one."""

    name: ProcessName
    comes_back: bool = True
    """Whether the daemon starts another one."""
    pid: int = 0
    """Which process of that name; 0: whichever there is."""


class Drain(Message, frozen=True):
    """Take no new requests, finish the running ones."""


class Answer(Message, frozen=True):
    """The answer to a client. Frame 0: JSON, or for `metrics` the Prometheus exposition text."""

    serial: int
    error: str = ""


ToProcess = HelloAnswer | DumpStacks | SetLogLevel
"""What every process gets; its `DaemonLink` deals with it. Each role gets some notices besides."""

ToClient = Answer
RouterNotice = PeerLost | Drain
WorkerNotice = PeerLost | CacheCommand
TokenizerNotice = PeerLost
FrontendNotice = InstanceStatus | Drain | Answer

TO_CLIENT: Final[Decoder[ToClient]] = Decoder(ToClient)
ROUTER_NOTICES: Final[Decoder[ToProcess | RouterNotice]] = Decoder(ToProcess | RouterNotice)
WORKER_NOTICES: Final[Decoder[ToProcess | WorkerNotice]] = Decoder(ToProcess | WorkerNotice)
TOKENIZER_NOTICES: Final[Decoder[ToProcess | TokenizerNotice]] = Decoder(
    ToProcess | TokenizerNotice
)
FRONTEND_NOTICES: Final[Decoder[ToProcess | FrontendNotice]] = Decoder(ToProcess | FrontendNotice)
