"""A client that reads many streams at little cost: raw sockets, epoll, events counted not parsed."""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from daemon.cli.check.event_stream import DATA, DONE

CHAT = "/v1/chat/completions"
CONTENT = b'"content":"'
ROLE_ONLY = b'"role":"assistant","content":""'


@dataclass
class OpenStream:
    """One streamed request on a connection of its own."""

    connection: socket.socket
    request_id: str
    sent_at: float
    events: int = 0
    first_content_at: float = 0.0
    done: bool = False
    _tail: bytes = field(default=b"", repr=False)

    def feed(self, data: bytes, now: float) -> int:
        data = self._tail + data
        # An event may be cut anywhere: count up to the last line end, keep the rest.
        cut = data.rfind(b"\n") + 1
        whole, self._tail = data[:cut], data[cut:]
        count = whole.count(DATA)
        if not self.first_content_at and whole.count(CONTENT) > whole.count(ROLE_ONLY):
            self.first_content_at = now
        self.done = self.done or DATA + DONE in whole
        self.events += count
        return count


def request_bytes(body: dict[str, object], request_id: str, host: str) -> bytes:
    payload = json.dumps({**body, "stream": True}).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"X-Request-Id: {request_id}\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    return head.encode() + payload


class StreamPool:
    """Keeps streams open and reads them. One thread."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._selector = selectors.EpollSelector()
        self.events = 0
        self.reads = 0
        """Pieces received. Small pieces that were written apart may come as one, so this is about what
        the server wrote, or less."""

    def open(
        self, body: dict[str, object], request_id: str, reuse: socket.socket | None = None
    ) -> OpenStream:
        connection = reuse
        if connection is None:
            connection = socket.create_connection(self._address, timeout=30)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data = request_bytes(body, request_id, self._address[0])
        connection.settimeout(30)
        stream = OpenStream(connection, request_id, time.perf_counter())
        connection.sendall(data)
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, stream)
        return stream

    def read(self, seconds: float, on_done: Callable[[OpenStream], None]) -> None:
        """Read what comes within `seconds`; `on_done` gets each stream that ends."""
        for key, _ in self._selector.select(seconds):
            stream: OpenStream = key.data
            data = stream.connection.recv(1 << 18)
            if not data:
                raise ConnectionError(f"the server closed the stream {stream.request_id}")
            self.reads += 1
            self.events += stream.feed(data, time.perf_counter())
            if stream.done:
                self._selector.unregister(stream.connection)
                on_done(stream)

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
