"""A tapper: reads what passes the router of a live instance."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Final

import msgspec
import zmq

from daemon.errors import DeepInferError
from daemon.report_types import TapReport
from daemon.run_directory import not_running, running_pid
from transport.framing import BadMessage, decode_header
from transport.messages import TAP_BODIES, TAP_HEADERS, Encode, Message, Submit, TapOpened, Tapped
from transport.sockets import Endpoints

OPEN_SECONDS: Final = 5.0
"""How long the router may take to notice a tapper."""
LOOK_SECONDS: Final = 0.25
"""While waiting, we look this often whether the instance is still there."""
QUEUE: Final = 1000
BATCH: Final = 200


class TapClient:
    """Owner of one socket. Use it as a context manager, on one thread."""

    def __init__(self, run_dir: Path, instance: str, bodies: bool) -> None:
        """Subscribe, and wait until the router has noticed.

        Raises:
            DeepInferError: the instance does not run, or its router does not answer.
        """
        self._run_dir, self._instance = run_dir, instance
        self._check_alive()
        self._serial: int | None = None
        """Of the next message; None: not known yet."""
        self._lost = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, QUEUE)
        self._socket.setsockopt(zmq.SUBSCRIBE, TAP_BODIES if bodies else TAP_HEADERS)
        self._socket.connect(Endpoints(str(run_dir)).tap)
        try:
            self._early = self._open()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> TapClient:
        """Nothing to do: connected already."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def take(self) -> list[TapReport]:
        """What has come, waiting up to LOOK_SECONDS for something.

        Raises:
            DeepInferError: the instance has ended.
        """
        found, self._early = self._early, []
        if not found and not self._socket.poll(round(LOOK_SECONDS * 1000)):
            self._check_alive()
        while len(found) < BATCH and self._socket.poll(0):
            report = self._receive()
            if report is not None:
                found.append(report)
        return found

    def close(self) -> None:
        """Free the socket. Idempotent."""
        self._socket.close()
        self._context.term()

    def _open(self) -> list[TapReport]:
        """What came before the greeting, for others that tap already."""
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
            match decode_header(header):
                case TapOpened(serial):
                    # A new router begins to count anew; else a gap is found at the next message.
                    if self._serial is None or serial < self._serial:
                        self._serial = serial
                case Tapped() as tapped:
                    if self._serial is not None:
                        self._lost += max(tapped.serial - self._serial, 0)
                    self._serial = tapped.serial + 1
                    return self._report(tapped, bodies)
                case _:
                    pass
        except BadMessage as error:
            raise DeepInferError(
                f"Instance {self._instance!r} speaks another version of the protocol: "
                "use the command line that it was started with."
            ) from error
        return None

    def _report(self, tapped: Tapped, bodies: list[bytes]) -> TapReport:
        lost, self._lost = self._lost, 0
        message = decode_header(bodies[0]) if bodies else None
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

    def _check_alive(self) -> None:
        if running_pid(self._run_dir) is None:
            raise DeepInferError(not_running(self._instance))


def _plain(value: object) -> object:
    """Structs as objects with the names of their fields."""
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
