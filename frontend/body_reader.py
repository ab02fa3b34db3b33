"""The process that reads a frontend's large bodies, started by the
frontend, with a socket as standard input. It ends when that closes."""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable
from typing import BinaryIO, Final

import msgspec
import setproctitle

from frontend.api.openai_chat import CHAT
from frontend.api.openai_completions import COMPLETIONS
from frontend.api.tokenize import DETOKENIZE, TOKENIZE
from frontend.errors import ApiError
from frontend.generation.request import ModelLimits
from frontend.links.body_reader import REPLY, REQUEST, Errand, Refusal
from transport.child import give_way
from transport.logs import Seldom, configure_logging
from transport.output import use_lossy_output

READERS: Final[dict[str, Callable[[bytes, ModelLimits], object]]] = {
    CHAT.form.name: CHAT.form.read,
    COMPLETIONS.form.name: COMPLETIONS.form.read,
    TOKENIZE.name: TOKENIZE.read,
    DETOKENIZE.name: DETOKENIZE.read,
}

log = logging.getLogger(__name__)
_tracebacks = Seldom()


def serve(line: BinaryIO, answers: BinaryIO) -> None:
    """Read bodies until the line ends."""
    errands = msgspec.msgpack.Decoder(Errand)
    while len(sizes := line.read(REQUEST.size)) == REQUEST.size:
        head_size, body_size = REQUEST.unpack(sizes)
        errand = errands.decode(line.read(head_size))
        is_refused, reply = _read(errand, line.read(body_size))
        answers.write(REPLY.pack(is_refused, len(reply)))
        answers.write(reply)
        answers.flush()
        gc.collect()


def _read(errand: Errand, body: bytes) -> tuple[bool, bytes]:
    try:
        return False, msgspec.msgpack.encode(READERS[errand.form](body, errand.limits))
    except ApiError as error:
        refusal = Refusal(error.status, error.message, error.param, error.code)
    # A fault of ours must end one request, not all that wait.
    except Exception as error:
        log.error("a body could not be read: %r", error, exc_info=_tracebacks.allows())
        refusal = Refusal(500, "The server failed on this request; its log says why.")
    return True, msgspec.msgpack.encode(refusal)


def main(frontend: str, instance: str, log_level: str) -> None:
    # The frontend ends this process, which must outlast the requests that it drains.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    setproctitle.setproctitle(f"deepinfer:{frontend} body reader [{instance}]")
    use_lossy_output()
    configure_logging(f"{frontend} reader", log_level)
    give_way()
    gc.freeze()
    gc.disable()  # while a body is decoded: each search would go through millions of new objects
    with socket.socket(fileno=0) as line, contextlib.suppress(ConnectionError):
        serve(line.makefile("rb"), line.makefile("wb"))


if __name__ == "__main__":
    main(*sys.argv[1:])
