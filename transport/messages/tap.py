"""From the router to whoever taps it, XPUB/SUB. The topic is a frame of its own, before the header."""

from __future__ import annotations

from typing import Final

from msgspec.msgpack import Decoder

from transport.ids import ProcessName, RequestId
from transport.messages.base import Message

TAP_HEADERS: Final = b"headers"


TAP_BODIES: Final = b"bodies"


class TapOpened(Message, frozen=True):
    """Somebody taps from now on; all that tap the same topic are told."""

    serial: int
    """Of the next `Tapped`."""


class Tapped(Message, frozen=True):
    """One message that passed the router. With `TAP_BODIES` it follows: its header, and the
    beginning of each of its payload frames."""

    serial: int
    """Counts up by one: a gap is what the tapper was too slow for."""
    at: float
    """Unix time."""
    sender: ProcessName
    receiver: ProcessName
    kind: str
    """Name of the message."""
    request_ids: list[RequestId]
    header_bytes: int
    frame_bytes: list[int]


ToTapper = TapOpened | Tapped
TO_TAPPER: Final[Decoder[ToTapper]] = Decoder(ToTapper)
