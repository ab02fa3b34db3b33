"""A tap on the router: what passes is published while somebody subscribes, and only then.

A tapper that is too slow loses messages, which the serials tell it; the router never waits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import zmq

from transport.frame_limits import SUBSCRIPTION_BYTES
from transport.framing import Payload, encode_header
from transport.ids import ROUTER_NAME, ProcessName, RequestId
from transport.messages.base import Message
from transport.messages.generate import Cancel, Encode, Encoded, RequestFailed, Throttle, TokenBatch
from transport.messages.tap import TAP_BODIES, TAP_HEADERS, TapOpened, Tapped
from transport.messages.to_frontend import Finished
from transport.messages.to_router import SequenceFailed, Submit
from transport.messages.to_worker import Start
from transport.sockets import CountingSocket, Received

TAP_QUEUE: Final = 1000
"""Messages that a tapper may be behind."""
BODY_BYTES: Final = 4096
"""Of each payload frame; a multiple of the size of a token."""
TOPICS: Final = (TAP_HEADERS, TAP_BODIES)


class Tap(CountingSocket):
    """Owner of the publishing socket."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        socket = context.socket(zmq.XPUB)
        socket.setsockopt(zmq.SNDHWM, TAP_QUEUE)
        # Every subscription is told, so that each tapper is greeted.
        socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        super().__init__(socket, "tap", max_received=SUBSCRIPTION_BYTES)
        socket.bind(endpoint)
        self._serials = dict.fromkeys(TOPICS, 0)
        self._open: set[bytes] = set()

    @property
    def is_open(self) -> bool:
        """Whether anybody taps. Ask before `saw_*`: with nobody there, that is the whole cost."""
        return bool(self._open)

    def listen(self) -> None:
        while True:
            frames = self._receive_frames()
            if frames is None:
                return
            data = bytes(frames[0].buffer)
            joins, topic = data[:1] == b"\x01", data[1:]
            if topic not in TOPICS:
                continue
            if joins:
                self._open.add(topic)
                self._send_frames([topic, encode_header(TapOpened(self._serials[topic]))])
            else:
                self._open.discard(topic)

    def close(self) -> None:
        """Close; what tappers have not read is lost. Idempotent."""
        self.socket.close(linger=0)

    def saw_incoming(self, received: Received[Message]) -> None:
        message, frames = received.message, received.frames
        self._publish(received.peer, ROUTER_NAME, message, received.header, frames)

    def saw_outgoing(
        self, receiver: ProcessName, message: Message, frames: Sequence[Payload]
    ) -> None:
        self._publish(ROUTER_NAME, receiver, message, encode_header(message), frames)

    def _publish(
        self,
        sender: ProcessName,
        receiver: ProcessName,
        message: Message,
        header: Payload,
        frames: Sequence[Payload],
    ) -> None:
        views = [_view(frame) for frame in frames]
        for topic in self._open:
            tapped = Tapped(
                serial=self._serials[topic],
                at=time.time(),  # noqa: TID251  shown to a person
                sender=sender,
                receiver=receiver,
                kind=type(message).__name__,
                request_ids=_request_ids(message),
                header_bytes=len(_view(header)),
                frame_bytes=[view.nbytes for view in views],
            )
            self._serials[topic] += 1
            bodies: list[Payload] = []
            if topic == TAP_BODIES:
                bodies = [header, *(bytes(view[:BODY_BYTES]) for view in views)]
            self._send_frames([topic, encode_header(tapped), *bodies])


def _view(frame: Payload) -> memoryview:
    return frame.buffer if isinstance(frame, zmq.Frame) else memoryview(frame)


def _request_ids(message: Message) -> list[RequestId]:
    match message:
        case TokenBatch(request_ids=ids, started=started):
            return ids or [row[0] for row in started]
        case (
            Submit(request_id=one)
            | Cancel(request_id=one)
            | Throttle(request_id=one)
            | Encode(request_id=one)
            | Encoded(request_id=one)
            | RequestFailed(request_id=one)
            | SequenceFailed(request_id=one)
            | Start(request_id=one)
            | Finished(request_id=one)
        ):
            return [one]
        case _:
            return []
