"""A long prompt is encoded in a fork of the tokenizer.

The fork starts at once, for it shares the loaded tokenizer. It can be killed at any moment, which no
thread within the `tokenizers` library can be; it takes the gigabytes that a long prompt needs along
when it ends; and a prompt that crashes it, or for which memory is short, takes nothing else with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from msgspec.msgpack import Decoder

from transport.child import die_with_parent, give_way
from transport.framing import decode_header, encode_header
from transport.ids import RequestId
from transport.messages.generate import Encoded, RequestFailed

_PIPE_BYTES: Final = 1 << 20
_HEADER_SIZE_BYTES: Final = 4
_ANSWERS: Final[Decoder[Encoded | RequestFailed]] = Decoder(Encoded | RequestFailed)


@dataclass(frozen=True)
class Answer:
    """What the router is told of a prompt. `frames`: the token ids of one that is encoded."""

    message: Encoded | RequestFailed
    frames: tuple[memoryview, ...] = ()


class ForkedEncode:
    """One prompt being encoded. Owns the process and the pipe from it."""

    def __init__(self, request_id: RequestId, encode: Callable[[], Answer]) -> None:
        """`encode` runs in the fork. Must be called on the main thread, which the fork dies with.

        Raises:
            OSError: the operating system refuses another process.
        """
        self.request_id = request_id
        self.fd, write_end = os.pipe()
        os.set_blocking(self.fd, False)
        with contextlib.suppress(OSError):  # only fewer turns are needed
            fcntl.fcntl(self.fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._received = bytearray()
        parent = os.getpid()
        try:
            self._pid = os.fork()
        except OSError:
            os.close(self.fd)
            os.close(write_end)
            raise
        if self._pid == 0:
            _run(write_end, parent, encode)
        os.close(write_end)

    def read(self) -> Answer | None:
        """Take what has come; the answer, once it is whole or the fork has died without one."""
        try:
            piece = os.read(self.fd, _PIPE_BYTES)
        except BlockingIOError:
            return None
        if piece:
            self._received += piece
            return None
        if self._reap() != 0 or not self._received:
            text = "The server failed to encode the prompt: the process that did so died."
            return Answer(RequestFailed(self.request_id, 500, "tokenizer_failed", text))
        received = memoryview(self._received)
        end = _HEADER_SIZE_BYTES + int.from_bytes(received[:_HEADER_SIZE_BYTES], "little")
        message = decode_header(received[_HEADER_SIZE_BYTES:end], _ANSWERS)
        return Answer(message, (received[end:],) if isinstance(message, Encoded) else ())

    def close(self) -> None:
        """Kill the process if it runs still. Idempotent."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            self._reap()

    def _reap(self) -> int:
        """The exit code of the process, which has ended or is about to."""
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        os.close(self.fd)
        return os.waitstatus_to_exitcode(status)


def _run(write_end: int, parent: int, encode: Callable[[], Answer]) -> NoReturn:
    """The fork's life. It returns to none of its parent's code, whose sockets are not its own."""
    code = 1
    try:
        die_with_parent(parent)
        give_way()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with contextlib.suppress(OSError):
            # Where memory is short, the kernel takes this process and not one that serves others.
            Path("/proc/self/oom_score_adj").write_text("1000")
        answer = encode()
        header = encode_header(answer.message)
        with open(write_end, "wb") as pipe:
            pipe.write(len(header).to_bytes(_HEADER_SIZE_BYTES, "little") + header)
            for frame in answer.frames:
                pipe.write(frame)
        code = 0
    finally:
        os._exit(code)
