"""uvicorn still has what `frontend/http/server.py` builds on, and nothing else builds on it.

`test_http_connections.py`, `test_http_limits.py` and `test_disconnects.py` say what must hold; this says
what to look at when a new uvicorn breaks it.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import uvicorn
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

ROOT = Path(__file__).parents[2]
ADVICE = (
    f"uvicorn {uvicorn.__version__} is not the one that frontend/http/server.py was written for: %s. "
    "Read its httptools_impl.py and server.py against ours, adapt ours, run "
    "tests/frontend/test_http_connections.py, test_http_limits.py and test_disconnects.py, and then move "
    "the pin in pyproject.toml."
)


def check(holds: bool, what: str) -> None:
    assert holds, ADVICE % what


METHODS: list[tuple[Callable, list[str]]] = [
    # Overridden in `_Connection`.
    (HttpToolsProtocol.__init__, ["self", "config", "server_state", "app_state", "_loop"]),
    (HttpToolsProtocol.connection_made, ["self", "transport"]),
    (HttpToolsProtocol.connection_lost, ["self", "exc"]),
    (HttpToolsProtocol.data_received, ["self", "data"]),
    (HttpToolsProtocol.on_message_begin, ["self"]),
    (HttpToolsProtocol.on_headers_complete, ["self"]),
    (HttpToolsProtocol.on_message_complete, ["self"]),
    (HttpToolsProtocol.on_header, ["self", "name", "value"]),
    (HttpToolsProtocol.on_body, ["self", "body"]),
    (HttpToolsProtocol.on_response_complete, ["self"]),
    (HttpToolsProtocol.eof_received, ["self"]),
    (HttpToolsProtocol._start_asgi_task, ["self", "cycle", "app"]),
    # Called.
    (HttpToolsProtocol._unset_keepalive_if_required, ["self"]),
    (HttpToolsProtocol.timeout_keep_alive_handler, ["self"]),
    # Replaced by `_UnframedSender`, and overridden in `_Server`.
    (RequestResponseCycle.send, ["self", "message"]),
    (uvicorn.Server.capture_signals, ["self"]),
    (uvicorn.Server.serve, ["self", "sockets"]),
]


@pytest.mark.parametrize(
    ("method", "parameters"), METHODS, ids=[method.__qualname__ for method, _ in METHODS]
)
def test_the_methods_have_their_parameters(method, parameters):
    found = list(inspect.signature(method).parameters)
    check(found == parameters, f"{method.__qualname__} takes {found} and not {parameters}")


def test_the_objects_have_their_attributes():
    async def app(scope, receive, send): ...

    async def make() -> tuple[object, ...]:
        config = uvicorn.Config(app, log_config=None)
        server = uvicorn.Server(config)
        connection = HttpToolsProtocol(config, ServerState(), {})
        cycle = RequestResponseCycle(
            {}, None, None, None, None, False, [], asyncio.Event(), False, True, lambda: None
        )
        connection.on_message_begin()
        return server, server.server_state, connection, cycle

    names = (
        "should_exit server_state",
        "connections",
        "loop transport parser scope headers url cycle pipeline timeout_keep_alive"
        " timeout_keep_alive_task",
        "scope disconnected message_event response_started response_complete chunked_encoding"
        " expected_content_length keep_alive",
    )
    for owner, wanted in zip(asyncio.run(make()), names, strict=True):
        missing = [name for name in wanted.split() if not hasattr(owner, name)]
        check(not missing, f"{type(owner).__name__} has no {', '.join(missing)}")


class Recorder:
    """What httptools reports."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.parser = HttpRequestParser(self)

    def on_message_begin(self) -> None:
        self.events.append("begin")

    def on_headers_complete(self) -> None:
        self.events.append(f"head, upgrade={self.parser.should_upgrade()}")

    def on_message_complete(self) -> None:
        self.events.append("end")


def test_httptools_stops_behind_a_head_that_asks_for_an_upgrade():
    """`_Connection._parse` goes on from there."""
    recorder = Recorder()
    data = b"POST / HTTP/1.1\r\nContent-Length: 4\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    with pytest.raises(HttpParserUpgrade) as stop:
        recorder.parser.feed_data(data + b"body")
    check(stop.value.args == (len(data),), f"an upgrade is reported at {stop.value.args}")
    check(
        recorder.events == ["begin", "head, upgrade=True", "end"],
        f"a head that asks for an upgrade is reported as {recorder.events}",
    )


def test_httptools_takes_empty_lines_for_no_beginning():
    recorder = Recorder()
    recorder.parser.feed_data(b"\r\n\r\n")
    check(recorder.events == [], "an empty line begins a message")


def test_a_fault_in_a_callback_stops_the_parser():
    class Faulty(Recorder):
        def on_headers_complete(self) -> None:
            raise ValueError("a fault")

    with pytest.raises(HttpParserError):
        Faulty().parser.feed_data(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")


def test_status_lines_can_be_written():
    line = httptools_impl.STATUS_LINE[431]
    check(line == b"HTTP/1.1 431 Request Header Fields Too Large\r\n", f"STATUS_LINE has {line!r}")


def test_nothing_else_in_the_product_knows_uvicorn():
    users = set()
    for package in ("daemon", "frontend", "hicache", "transport", "workers"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                modules = (
                    [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                )
                if isinstance(node, ast.ImportFrom):
                    modules.append(node.module or "")
                if any(module.split(".")[0] == "uvicorn" for module in modules):
                    users.add(str(path.relative_to(ROOT)))
    assert users == {"frontend/http/server.py"}
