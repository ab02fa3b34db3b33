"""Headers to bytes and back. A message is `[header][payload frame ...]`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import zmq
from msgspec.msgpack import Decoder

from transport.messages.base import Message

Payload = bytes | bytearray | memoryview | zmq.Frame

TokenArray = npt.NDArray[np.int32]
"""Token ids."""

MessageT = TypeVar("MessageT", bound=Message)

_encoder = msgspec.msgpack.Encoder()


class BadMessage(ValueError):
    """A peer sent something that is no message of this protocol version, or not for this receiver."""


def encode_header(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_header(frame: Payload, decoder: Decoder[MessageT]) -> MessageT:
    """The message of a header frame. `decoder` knows the kinds that this receiver takes.

    Raises:
        BadMessage: another kind, wrong types or no msgpack at all.
    """
    try:
        return decoder.decode(frame.buffer if isinstance(frame, zmq.Frame) else frame)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise BadMessage(f"not a message of this protocol version: {error}") from error


def payload_bytes(frame: Payload) -> int:
    return frame.nbytes if isinstance(frame, memoryview) else len(frame)


def token_frame(ids: Sequence[int] | TokenArray) -> memoryview:
    """Token ids as a payload frame (little-endian int32)."""
    return np.ascontiguousarray(ids, dtype="<i4").data.cast("B")


def read_tokens(frame: Payload) -> TokenArray:
    """Token ids of a payload frame, without a copy.

    Raises:
        BadMessage: the frame's length is no multiple of four.
    """
    buffer = frame.buffer if isinstance(frame, zmq.Frame) else memoryview(frame)
    if buffer.nbytes % 4:
        raise BadMessage(f"a token frame of {buffer.nbytes} bytes")
    return np.frombuffer(buffer, dtype="<i4")
