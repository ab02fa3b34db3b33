"""What every message is, and the greeting of every connection."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from transport.ids import ProcessName

PROTOCOL_VERSION: Final = 3


Role = Literal["daemon", "router", "frontend", "tokenizer", "worker", "client"]


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False, omit_defaults=True):
    """Base of all headers. The class name is the tag."""


class Hello(Message, frozen=True):
    """Who connects. Answered with `Welcome` or `Refused`."""

    version: int
    role: Role
    name: ProcessName
    pid: int
    config_hash: str

    def problem(self, receiver: str, config_hash: str) -> str | None:
        """Why the receiver must refuse who says this; None: nothing is wrong."""
        if self.version != PROTOCOL_VERSION:
            return f"it speaks protocol {self.version}, the {receiver} speaks {PROTOCOL_VERSION}"
        if self.config_hash != config_hash:
            return "it was started with another configuration"
        return None


class Welcome(Message, frozen=True):
    """The peer is accepted."""


class Refused(Message, frozen=True):
    """The peer is not accepted; it must exit with this reason."""

    reason: str


HelloAnswer = Welcome | Refused
