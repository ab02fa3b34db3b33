"""A tapper: reads what passes the router of a live instance."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final, assert_never

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from daemon.errors import DeepInferError
from daemon.inspection.instance_client import InstanceClient
from daemon.inspection.report_types import TapReport
from transport.frame_limits import REPORT_BYTES
from transport.framing import BadMessage, decode_header
from transport.messages.any import ANY_MESSAGE
from transport.messages.base import Message
from transport.messages.generate import Encode
from transport.messages.tap import TAP_BODIES, TAP_HEADERS, TO_TAPPER, TapOpened, Tapped
from transport.messages.to_router import Submit
from transport.sockets import Endpoints

OPEN_SECONDS: Final = 5.0
"""How long the router may take to notice a tapper."""
LOOK_SECONDS: Final = 0.25
"""While waiting, we look this often whether the instance is still there."""
QUEUE: Final = 1000
BATCH: Final = 200


class TapClient(InstanceClient):
    """Owner of one socket. Use it as a context manager, on one thread.

    When the router ends, its successor is tapped as soon as it is there; `notices` tells of both.
    """

    def __init__(self, run_dir: Path, instance: str, bodies: bool) -> None:
        """Subscribe, and wait until the router has noticed.

        Raises:
            DeepInferError: the instance does not run, or its router does not answer.
        """
        super().__init__(run_dir, instance)
        self._serial: int | None = None
        """The next message's; None: not known yet."""
        self._lost = 0
        self._router_is_gone = False
        self._notices: list[str] = []
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, QUEUE)
        self._socket.setsockopt(zmq.MAXMSGSIZE, REPORT_BYTES)
        self._socket.setsockopt(zmq.SUBSCRIBE, TAP_BODIES if bodies else TAP_HEADERS)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        for socket in (self._socket, self._monitor):
            self._poller.register(socket, zmq.POLLIN)
        self._socket.connect(Endpoints(str(run_dir)).tap)
        try:
            self._early = self._open()
        except BaseException:
            self.close()
            raise

    def take(self) -> list[TapReport]:
        """What has come, waiting up to LOOK_SECONDS for something.

        Raises:
            DeepInferError: the instance has ended.
        """
        found, self._early = self._early, []
        if not found and not self._poller.poll(round(LOOK_SECONDS * 1000)):
            self._check_alive()
        self._notice_loss()  # first: who greets after it is the next router
        while len(found) < BATCH and self._socket.poll(0):
            report = self._receive()
            if report is not None:
                found.append(report)
        return found

    def notices(self) -> list[str]:
        notices, self._notices = self._notices, []
        return notices

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._context.term()

    def _notice_loss(self) -> None:
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            if not self._router_is_gone:
                self._router_is_gone = True
                self._notices.append(
                    "The router has ended: the next one is tapped once it is there."
                )

    def _open(self) -> list[TapReport]:
        """Wait for the greeting; returns the messages that came before it, for others that tap
        already."""
        early: list[TapReport] = []
        deadline = time.monotonic() + OPEN_SECONDS
        while self._serial is None:
            self._check_alive()
            if time.monotonic() > deadline:
                raise DeepInferError(
                    f"The router has not answered within {OPEN_SECONDS:g} s: it hangs or is being "
                    "restarted; `deepinfer inspect processes` says which."
                )
            if self._socket.poll(round(LOOK_SECONDS * 1000)):
                report = self._receive()
                early += [] if report is None else [report]
        return early

    def _receive(self) -> TapReport | None:
        _topic, header, *bodies = self._socket.recv_multipart()
        try:
            match decode_header(header, TO_TAPPER):
                case TapOpened(serial):
                    # A new router begins to count anew; else a gap is found at the next message.
                    if self._serial is None or self._router_is_gone:
                        self._serial = serial
                    if self._router_is_gone:
                        self._router_is_gone = False
                        self._notices.append("The next router is tapped.")
                case Tapped() as tapped:
                    if self._serial is not None:
                        self._lost += max(tapped.serial - self._serial, 0)
                    self._serial = tapped.serial + 1
                    return self._report(tapped, bodies)
                case other:
                    assert_never(other)
        except BadMessage as error:
            raise self._other_version() from error
        return None

    def _report(self, tapped: Tapped, bodies: list[bytes]) -> TapReport:
        lost, self._lost = self._lost, 0
        message = decode_header(bodies[0], ANY_MESSAGE) if bodies else None
        return TapReport(
            at=tapped.at,
            sender=tapped.sender,
            receiver=tapped.receiver,
            message=tapped.kind,
            request_ids=list(tapped.request_ids),
            header_bytes=tapped.header_bytes,
            payload_bytes=sum(tapped.frame_bytes),
            lost=lost,
            header=None if message is None else _plain(message),
            payload=[] if message is None else _payload(message, tapped.frame_bytes, bodies[1:]),
        )


def _plain(value: object) -> object:
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _payload(message: Message, sizes: list[int], frames: list[bytes]) -> list[str]:
    is_text = isinstance(message, Submit | Encode) and message.kind != "tokens"
    shown = []
    for number, (size, frame) in enumerate(zip(sizes, frames, strict=True)):
        if is_text:
            text = frame.decode("utf-8", "replace")
        elif number == 0:
            text = " ".join(map(str, memoryview(frame[: len(frame) // 4 * 4]).cast("i")))
        else:
            text = ""  # logprobs
        cut = size - len(frame)
        shown.append(f"{text} … {cut} bytes more" if cut else text or f"{size} bytes")
    return shown
