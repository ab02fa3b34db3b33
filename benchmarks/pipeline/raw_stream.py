"""The floor of the streaming benchmark: one `send` a token, and nothing else.

Ready-made bytes of the same length as our events go round all open connections, one system call
each, at a pace that the client keeps up with. No HTTP but what the client needs to begin.
`python -m benchmarks.pipeline.raw_stream PORT`.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import sys
import time

CHUNK = {
    "id": "chatcmpl-0123456789abcdef0123456789abcdef",
    "object": "chat.completion.chunk",
    "created": 1_700_000_000,
    "model": "SmolLM2-135M-Instruct",
    "choices": [
        {"index": 0, "delta": {"content": " word"}, "logprobs": None, "finish_reason": None}
    ],
}
EVENT = f"data: {json.dumps(CHUNK, separators=(',', ':'))}\n\n".encode()
FRAMED = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
ROUND_SECONDS = 0.004
REFUSAL = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def serve(port: int) -> None:
    listener = socket.create_server(("127.0.0.1", port), backlog=1024)
    listener.setblocking(False)
    selector = selectors.EpollSelector()
    selector.register(listener, selectors.EVENT_READ)
    streams: set[socket.socket] = set()
    next_round = 0.0
    while True:
        wait = max(next_round - time.monotonic(), 0.0) if streams else None
        for key, _ in selector.select(wait):
            if key.fileobj is listener:
                connection, _ = listener.accept()
                connection.setblocking(False)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                selector.register(connection, selectors.EVENT_READ)
            else:
                _take(key.fileobj, selector, streams)  # type: ignore[arg-type]
        now = time.monotonic()
        if now < next_round:
            continue
        next_round = now + ROUND_SECONDS
        for connection in streams:
            # A full connection waits for its next turn; a closed one shows in the selector.
            with contextlib.suppress(OSError):
                connection.send(FRAMED)


def _take(
    connection: socket.socket, selector: selectors.BaseSelector, streams: set[socket.socket]
) -> None:
    try:
        data = connection.recv(65_536)
    except ConnectionError:
        data = b""
    if data.startswith(b"POST"):
        streams.add(connection)
        return
    if data.startswith(b"GET"):
        connection.send(REFUSAL)
    selector.unregister(connection)
    streams.discard(connection)
    connection.close()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
