"""ZMQ sockets as this product uses them: bounded, lingering briefly, counting their traffic.

Everything goes over `ipc://` files in the instance's run directory. The router and the daemon
bind one ROUTER socket each; every other process connects a DEALER whose identity is its name. A
peer that stops reading fills the (bounded) queue and makes `send` say so; nothing blocks.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import msgspec
import zmq
from msgspec.msgpack import Decoder

from transport.frame_limits import REPORT_BYTES, SUBSCRIPTION_BYTES
from transport.framing import (
    BadMessage,
    MessageT,
    Payload,
    decode_header,
    encode_header,
    payload_bytes,
)
from transport.ids import ProcessName
from transport.logs import Seldom
from transport.messages.base import Message
from transport.messages.telemetry import Snapshot
from transport.messages.to_daemon import SNAPSHOTS
from transport.telemetry.values import SocketStats

LINGER_MS = 500
HIGH_WATER_MARK = 20_000
"""Messages per peer. In-flight work is bounded by admission; reaching this means a stuck peer."""
COPY_BELOW_BYTES = 65_536
"""Frames below this size are cheaper to copy than to share."""
IPC_PATH_MAX_BYTES = 107

MessageT_co = TypeVar("MessageT_co", bound=Message, covariant=True)

log = logging.getLogger(__name__)


ROUTER_SOCKET: Final = "router.sock"
CONTROL_SOCKET: Final = "control.sock"
TELEMETRY_SOCKET: Final = "telemetry.sock"
TAP_SOCKET: Final = "tap.sock"
SOCKET_FILES: Final = (ROUTER_SOCKET, CONTROL_SOCKET, TELEMETRY_SOCKET, TAP_SOCKET)


@dataclass(frozen=True)
class Endpoints:
    """The socket addresses of one instance, all derived from its run directory."""

    run_dir: str

    def _address(self, name: str) -> str:
        return f"ipc://{os.path.join(self.run_dir, name)}"

    @property
    def router(self) -> str:
        """Requests and tokens; bound by the router."""
        return self._address(ROUTER_SOCKET)

    @property
    def control(self) -> str:
        """Hello, commands and inspection; bound by the daemon."""
        return self._address(CONTROL_SOCKET)

    @property
    def telemetry(self) -> str:
        """Snapshots, PUB to SUB; bound by the daemon."""
        return self._address(TELEMETRY_SOCKET)

    @property
    def tap(self) -> str:
        """What passes the router, XPUB to SUB; bound by the router."""
        return self._address(TAP_SOCKET)

    def path_problem(self) -> str | None:
        """Why these addresses cannot be bound, or None. The kernel bounds the length of a path."""
        longest = os.path.join(self.run_dir, max(SOCKET_FILES, key=len))
        length = len(os.fsencode(longest))
        if length <= IPC_PATH_MAX_BYTES:
            return None
        return (
            f"the socket path {longest} has {length} bytes, but a socket path may have at most "
            f"{IPC_PATH_MAX_BYTES}: choose a shorter --run-dir or --instance"
        )


class Received(msgspec.Struct, Generic[MessageT_co], frozen=True):
    """One received message; `peer` is set by ROUTER sockets only."""

    message: MessageT_co
    header: zmq.Frame
    """The message as it came, for forwarding."""
    frames: list[zmq.Frame]
    peer: ProcessName


class FrameTooLargeError(ValueError):
    """The other side would drop the connection; `limit` is what it takes, in bytes."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"a frame of {size} bytes, but this link carries {limit}")
        self.limit = limit


class CountingSocket:
    """A socket with a name, traffic counters, a limit on the size of its frames, and our message framing."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        name: str,
        max_frame: int = REPORT_BYTES,
        max_received: int | None = None,
    ) -> None:
        """To be called before `socket` is bound or connected. `max_received`: of a frame that comes in, where
        that is not what may go out."""
        socket.setsockopt(zmq.MAXMSGSIZE, max_frame if max_received is None else max_received)
        self.socket = socket
        self._max_frame = max_frame
        self._name = name
        self._received = self._received_bytes = 0
        self._sent = self._sent_bytes = self._refused = 0
        self._bad_messages = Seldom()

    @property
    def fd(self) -> int:
        """Edge-triggered descriptor that becomes readable when the socket's state changes."""
        return int(self.socket.getsockopt(zmq.FD))

    def stats(self) -> SocketStats:
        return SocketStats(
            self._name,
            self._received,
            self._received_bytes,
            self._sent,
            self._sent_bytes,
            self._refused,
        )

    def close(self) -> None:
        """Close; unsent messages get LINGER_MS. Idempotent."""
        self.socket.close(linger=LINGER_MS)

    def _receive_frames(self) -> list[zmq.Frame] | None:
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        self._received += 1
        self._received_bytes += sum(len(frame) for frame in frames)
        return frames

    def _send_frames(self, frames: list[Payload]) -> bool:
        sizes = [payload_bytes(frame) for frame in frames]
        size = sum(sizes)
        if size > self._max_frame and (largest := max(sizes)) > self._max_frame:
            raise FrameTooLargeError(largest, self._max_frame)
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=size < COPY_BELOW_BYTES)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self._refused += 1
            return False
        self._sent += 1
        self._sent_bytes += size
        return True


class ReceivingSocket(CountingSocket, ABC, Generic[MessageT]):
    """A socket that takes the messages of one receiver and no others."""

    @abstractmethod
    def _take(self) -> Received[MessageT] | None:
        """The next message that is there. Raises BadMessage for one that is not for this receiver."""

    def drain(self, limit: int = 1000) -> Iterator[Received[MessageT]]:
        """Messages that are there now, at most `limit`. A bad one raises BadMessage."""
        for _ in range(limit):
            received = self._take()
            if received is None:
                return
            yield received

    def receive(self, handle: Callable[[Received[MessageT]], None], limit: int = 1000) -> int:
        """Pass what is there now to `handle`, at most `limit` messages; returns their number. Bad ones
        are logged and dropped, also if `handle` is who finds them to be bad."""
        for count in range(limit):
            try:
                received = self._take()
                if received is None:
                    return count
                handle(received)
            except BadMessage as error:
                self._bad_messages.log(
                    log, logging.ERROR, "dropped a message that cannot be read: %s", error
                )
        return limit


class DealerSocket(ReceivingSocket[MessageT]):
    """A process's connection to the router or to the daemon."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        identity: ProcessName,
        decoder: Decoder[MessageT],
        max_frame: int = REPORT_BYTES,
    ) -> None:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity.encode())
        _limit(socket)
        super().__init__(socket, _name(endpoint), max_frame)
        socket.connect(endpoint)
        self._decoder = decoder

    @property
    def can_send(self) -> bool:
        return bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)

    def send(self, message: Message, *frames: Payload) -> bool:
        """Send; False if the peer has not taken HIGH_WATER_MARK earlier messages.

        Raises:
            FrameTooLargeError: a frame is larger than this link may carry.
        """
        return self._send_frames([encode_header(message), *frames])

    def _take(self) -> Received[MessageT] | None:
        frames = self._receive_frames()
        if frames is None:
            return None
        message = decode_header(frames[0], self._decoder)
        return Received(message, frames[0], frames[1:], ProcessName(""))


class RouterSocket(ReceivingSocket[MessageT]):
    """The bound side. A restarted peer takes over its identity; unknown peers are an error."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        decoder: Decoder[MessageT],
        max_frame: int = REPORT_BYTES,
    ) -> None:
        socket = context.socket(zmq.ROUTER)
        _limit(socket)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        super().__init__(socket, _name(endpoint), max_frame)
        socket.bind(endpoint)
        self._decoder = decoder

    def send(self, peer: ProcessName, message: Message, *frames: Payload) -> bool:
        """Send to a peer; False if it is not connected or does not read."""
        return self._send_frames([peer.encode(), encode_header(message), *frames])

    def forward(self, peer: ProcessName, received: Received[Message]) -> bool:
        return self._send_frames([peer.encode(), received.header, *received.frames])

    def _take(self) -> Received[MessageT] | None:
        frames = self._receive_frames()
        if frames is None:
            return None
        peer = ProcessName(bytes(frames[0].buffer).decode("utf-8", "replace"))
        message = decode_header(frames[1], self._decoder)
        return Received(message, frames[1], frames[2:], peer)


class PublisherSocket(CountingSocket):
    """A process's snapshots to the daemon. What the daemon is too slow for is lost."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, queue: int) -> None:
        """`queue`: messages that may wait for the daemon."""
        socket = context.socket(zmq.PUB)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, queue)
        super().__init__(socket, _name(endpoint), max_received=SUBSCRIPTION_BYTES)
        socket.connect(endpoint)

    def publish(self, message: Message) -> bool:
        return self._send_frames([encode_header(message)])


class SubscriberSocket(ReceivingSocket[Snapshot]):
    """The daemon's side of all snapshots."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, queue: int) -> None:
        """`queue`: messages of one process that may wait."""
        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, queue)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        super().__init__(socket, _name(endpoint))
        socket.bind(endpoint)

    def _take(self) -> Received[Snapshot] | None:
        frames = self._receive_frames()
        if frames is None:
            return None
        message = decode_header(frames[0], SNAPSHOTS)
        return Received(message, frames[0], [], ProcessName(""))


def _name(endpoint: str) -> str:
    return endpoint.rsplit("/", 1)[-1].removesuffix(".sock")


def _limit(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
