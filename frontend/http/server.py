"""The HTTP server. It is uvicorn with what uvicorn lacks, and nothing outside of this file knows that.

* The head of a request is bounded in size and in time, trailers in size.
* A wish to upgrade the protocol is ignored: the body behind it is a body.
* What cannot be parsed is answered with an error object and a request id, reported, and the
  connection is closed so that the answer is not lost to a reset.
* An HTTP/1.0 client gets no chunk sizes: a stream ends with the connection.
* What is wrong with one request never cuts the answer to the one before it.
* A client that goes away is noticed also while further requests wait on its connection; one that only
  stops sending gets its answer.
* What the kernel buffers for a client that does not read is bounded.
* The application may cut a connection at once (`ABORT` in the scope's extensions).

uvicorn has no public way to any of these, so `_Connection` overrides private methods of its protocol.
`tests/frontend/test_uvicorn.py` says which ones, and fails where a new uvicorn changes one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import uuid
from collections.abc import Callable, Iterator
from typing import Any, cast

import httptools
import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn._types import ASGI3Application, ASGISendEvent
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from frontend.errors import ApiError
from frontend.http.call import ABORT, kept_request_id
from frontend.http.reply import LINGER_BYTES, LINGER_SECONDS

BACKLOG = 2048
FLUSH_SECONDS = 5
"""How long answers that are complete may take to reach their clients when the server stops."""
UNSENT_BYTES = 131_072
"""Unsent bytes that the kernel takes of a connection. Its own bound is several megabytes: a slow
reader would be noticed far too late."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""Every HTTP/1.1 client skips it (RFC 9110, 15.2)."""
FIRST_PROBE_SECONDS = 0.01
LAST_PROBE_SECONDS = 1.0
TCP_CLOSE = 7
"""The state of a socket, in the first byte of TCP_INFO, whose peer has sent a reset."""

OnRefused = Callable[[int, str, float], None]
"""Told of a request that was refused by its head, which the application never sees: the status, the
request id, and the seconds since the head began."""


class HttpLimits(msgspec.Struct, frozen=True):
    """What clients may take of the server."""

    head_bytes: int
    head_seconds: float
    """Time within which the head of a request must have arrived."""
    keep_alive_seconds: int


class HttpServer:
    """Serves an ASGI application on one listening socket."""

    def __init__(self, app: ASGIApp, limits: HttpLimits, on_refused: OnRefused) -> None:
        # uvicorn would log every request that it cannot parse.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        self._server = _Server(_Config(app, limits, on_refused))

    @property
    def connections(self) -> int:
        return len(self._server.server_state.connections)

    async def serve(self, listener: socket.socket) -> None:
        """Serve until `stop`; closes the listener."""
        await self._server.serve(sockets=[listener])

    def stop(self) -> None:
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """Leaves signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Config(uvicorn.Config):
    def __init__(self, app: ASGIApp, limits: HttpLimits, on_refused: OnRefused) -> None:
        super().__init__(
            cast("ASGI3Application", app),
            http=_Connection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=limits.keep_alive_seconds,
            timeout_graceful_shutdown=FLUSH_SECONDS,
        )
        self.limits = limits
        self.on_refused = on_refused


class _Connection(HttpToolsProtocol):
    def __init__(
        self,
        config: _Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = config.limits
        self._on_refused = config.on_refused
        self._in_head = False
        """A head has begun and is not complete."""
        self._in_body = False
        self._overhead = 0
        """Bytes received since the last head or piece of a body that was complete: those of a head, or
        of the sizes, extensions and trailers of a chunked body."""
        self._trailer_bytes = 0
        self._head_began = 0.0
        self._head_timer: asyncio.TimerHandle | None = None
        self._fault: ApiError | None = None
        """What is wrong with a request that could be parsed."""
        self._is_refused = False
        self._dropped = 0
        self._waiting_refusal: ApiError | None = None
        """Sent once the requests before the faulty one have their answers."""
        self._running: RequestResponseCycle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._socket = transport.get_extra_info("socket")
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        # uvicorn starts this only after the first request: a client that never sends one would stay.
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        self._unset_keepalive_if_required()
        self._disconnect_running()  # uvicorn tells only the request that was read last
        super().connection_lost(exc)

    # ---- what arrives ----

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            self._dropped += len(data)
            if self._dropped > LINGER_BYTES:
                self.transport.pause_reading()
            return
        self._overhead += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._refuse(self._fault or ApiError(400, "This is no valid HTTP/1.1 request."))
            return
        if self._overhead > self._limits.head_bytes:
            self._refuse(self._trailers_too_large() if self._in_body else self._head_too_large())

    def _parse(self, data: bytes) -> None:
        """Parse without ever leaving HTTP/1.1. The parser stops at a head that asks for an upgrade, and
        takes what follows for another protocol, though it is the body of a request that is to be
        answered as if nothing had been asked (RFC 9110, 7.8)."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stop:
                data = self._head_without_upgrade() + data[stop.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _head_without_upgrade(self) -> bytes:
        fields = [(name, value) for name, value in self.headers if name != b"upgrade"]
        method = self.parser.get_method()
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        return b"\r\n".join(lines + [b"%b: %b" % field for field in fields]) + b"\r\n\r\n"

    def on_message_begin(self) -> None:
        """Called for the first byte of a head; empty lines before it are none (RFC 9112, 2.2)."""
        super().on_message_begin()
        self._in_head = True
        if not self._is_answering():
            self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:
            super().on_header(name, value)
            return
        # A trailer. None is of use here, and among the headers it could contradict what was checked.
        self._trailer_bytes += _field_bytes(name, value)
        if self._trailer_bytes > self._limits.head_bytes:
            self._fault = self._trailers_too_large()
            raise ValueError(self._fault.message)

    def on_headers_complete(self) -> None:
        # A head that came in one piece has not been measured before.
        self._fault = self._find_fault()
        if self._fault is not None:
            raise ValueError(self._fault.message)
        if self.parser.should_upgrade():
            return  # `_parse` brings it again
        self._in_head = False
        self._in_body = True
        self._overhead = self._trailer_bytes = 0
        self._stop_head_timer()
        cast("dict[str, Any]", self.scope)["extensions"] = {ABORT: self.transport.abort}
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._overhead = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_body = False
        self._overhead = 0
        super().on_message_complete()

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client that has sent whole requests and only stops sending (`nc -N`) gets its answers.

        One that has gone looks the same, and is found out by bytes that it does not take. HTTP/1.0 has
        no bytes that could be sent before an answer: there, the end of sending is the end.
        """
        running = self._running
        if not self._is_answering() or self._in_body or running is None:
            return False
        if running.scope["http_version"] == "1.0":
            return False
        self.cycle.keep_alive = False
        if self._probe_timer is None:
            if not running.response_started:
                self.transport.write(CONTINUE)
            self._probe(FIRST_PROBE_SECONDS)
        return True

    def _probe(self, seconds: float) -> None:
        """See, now and then, whether the client has refused what was sent to it."""
        if self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_CLOSE:
            self.transport.abort()
            return
        self._probe_timer = self.loop.call_later(
            seconds, self._probe, min(2 * seconds, LAST_PROBE_SECONDS)
        )

    # ---- heads ----

    def _find_fault(self) -> ApiError | None:
        size = len(self.url) + sum(_field_bytes(name, value) for name, value in self.headers)
        if size > self._limits.head_bytes:
            return self._head_too_large()
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts != 1 and self.parser.get_http_version() == "1.1":
            return ApiError(400, f"An HTTP/1.1 request has one Host header, this one has {hosts}.")
        if self.parser.get_method() == b"CONNECT":
            return ApiError(400, "This server is no proxy: it does not take CONNECT.")
        return None

    def _await_head(self) -> None:
        self._unset_keepalive_if_required()
        self._head_began = self.loop.time()
        self._head_timer = self.loop.call_later(self._limits.head_seconds, self._head_too_slow)

    def _head_too_slow(self) -> None:
        self._head_timer = None
        self._refuse(ApiError(408, "The head of the request did not arrive in time."))

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_too_large(self) -> ApiError:
        return ApiError(
            431, f"The head of the request is larger than {self._limits.head_bytes} bytes."
        )

    def _trailers_too_large(self) -> ApiError:
        limit = self._limits.head_bytes
        return ApiError(431, f"The body's chunk extensions or trailers exceed {limit} bytes.")

    # ---- answers ----

    def _is_answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        if cycle.scope["http_version"] == "1.0":
            # Each request has a cycle of its own, so only this one's `send` is replaced.
            cycle.send = _UnframedSender(cycle).send  # type: ignore[method-assign]
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() or self._is_answering():
            return
        if self._waiting_refusal is not None:
            self._send_refusal(self._waiting_refusal)
        elif self._in_head:
            self._await_head()

    def _refuse(self, error: ApiError) -> None:
        """Read no further, and answer after the requests that came before the faulty one."""
        self._is_refused = True
        self._stop_head_timer()
        if self._in_body and self.cycle is self._running:
            running = self._disconnect_running()
            if running is None or running.response_started:
                self.transport.close()
            else:
                self._send_refusal(error)
            return
        if self._in_body:
            self.pipeline.popleft()
        if self._is_answering():
            self._waiting_refusal = error
        else:
            self._send_refusal(error)

    def _send_refusal(self, error: ApiError) -> None:
        """Close a little after the answer."""
        if self.transport.is_closing():
            return
        body = error.body()
        request_id = self._request_id()
        self.transport.write(
            STATUS_LINE[error.status]
            + b"content-type: application/json\r\nconnection: close\r\n"
            + b"x-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (request_id.encode(), len(body))
            + body
        )
        self._on_refused(error.status, request_id, self.loop.time() - self._head_began)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _disconnect_running(self) -> RequestResponseCycle | None:
        running = self._running
        if running is None or running.response_complete:
            return None
        running.disconnected = True
        running.message_event.set()
        return running

    def _request_id(self) -> str:
        given = dict(self.headers or ()).get(b"x-request-id", b"")
        return kept_request_id(given) or uuid.uuid4().hex


def _field_bytes(name: bytes, value: bytes) -> int:
    return len(name) + len(value) + 4


class _UnframedSender:
    """Makes the answer for an HTTP/1.0 client end with the connection where its length is unknown."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._is_unframed = False

    async def send(self, message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start":
            names = [name.lower() for name, _ in message.get("headers", [])]
            self._is_unframed = b"content-length" not in names
            if self._is_unframed:
                self._cycle.chunked_encoding = False
        elif message["type"] == "http.response.body" and self._is_unframed:
            self._cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)
