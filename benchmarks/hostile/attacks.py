"""Hostile clients: one attack each, over and over. All of them are threads of one process."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.hostile.bodies import (
    COMPLETIONS,
    MANY_CHOICES,
    OVERTAKING,
    SHORT_STREAM,
    TRAILERS,
    UNREAD,
    json_request,
)

ANSWER_SECONDS: Final = 60.0
LEAVE_SECONDS: Final = 0.25
UNREAD_STREAMS: Final = 6
UNREAD_SECONDS: Final = 10.0
UNFINISHED_BODIES: Final = 60
UNFINISHED_SECONDS: Final = 5.0
SMALL_BUFFER: Final = 4096
SMUGGLED_IN: Final = "MORE THAN ONE ANSWER"
CUT: Final = "THE STREAM WAS CUT"

SMUGGLED: Final = b"GET /v1/models HTTP/1.1\r\nHost: smuggled\r\n\r\n"
UPGRADE: Final = (
    b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
    b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
) % (COMPLETIONS.encode(), len(SMUGGLED))
CHUNKED: Final = (
    b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
) % COMPLETIONS.encode()


class Hostile:
    """What the attacks need. An attack is a method; it returns what came of it."""

    def __init__(self, port: int, folder: Path) -> None:
        """`folder`: the files of `write_large`."""
        self._port = port
        self._folder = folder
        self._ended = threading.Event()
        self._turn = itertools.count()

    def run(self, seconds: float) -> Counter[tuple[str, str]]:
        """Attack with all clients at once; how often each attack came to what."""
        found: Counter[tuple[str, str]] = Counter()
        lock = threading.Lock()

        def client(name: str, attack: Callable[[], str]) -> None:
            while not self._ended.is_set():
                try:
                    outcome = attack()
                except ConnectionError:
                    outcome = "closed"
                except TimeoutError:
                    outcome = f"nothing for {ANSWER_SECONDS:g} s"
                with lock:
                    found[name, outcome] += 1

        threads = [threading.Thread(target=client, args=item) for item in self.attacks().items()]
        for thread in threads:
            thread.start()
        self._ended.wait(seconds)
        self._ended.set()
        for thread in threads:
            thread.join()
        return found

    def attacks(self) -> dict[str, Callable[[], str]]:
        return {
            "prompts of 30 MB, left after 0.25 s": lambda: self._leave("prompt"),
            "bodies of 2.4 million keys": lambda: self._post("keys"),
            "gzip of 10.6 million lists": lambda: self._post("gzip"),
            "15 million ids": lambda: self._post(("ids", "detokenize")[next(self._turn) % 2]),
            "256 prompts × n 16, left after 0.25 s": self.many_choices,
            "6 streams of 16 choices, unread for 10 s": self.unread_streams,
            "60 unfinished bodies of 30 MB": self.unfinished_bodies,
            "trailers without end": self.trailers,
            "a request or an empty line behind a body": self.behind_a_body,
            "priority −2⁶³": lambda: self._send(json_request(COMPLETIONS, OVERTAKING)),
        }

    def many_choices(self) -> str:
        with self._connect() as connection:
            connection.sendall(json_request(COMPLETIONS, MANY_CHOICES))
            return _status(connection, LEAVE_SECONDS)

    def unread_streams(self) -> str:
        with contextlib.ExitStack() as stack:
            for _ in range(UNREAD_STREAMS):
                connection = stack.enter_context(self._connect(SMALL_BUFFER))
                connection.sendall(json_request(COMPLETIONS, UNREAD))
            self._ended.wait(UNREAD_SECONDS)
            return "left"

    def unfinished_bodies(self) -> str:
        refused = 0
        with contextlib.ExitStack() as stack:
            for _ in range(UNFINISHED_BODIES):
                connection = stack.enter_context(self._connect())
                try:
                    self._send_file(connection, "unfinished")
                except (ConnectionError, TimeoutError):
                    refused += 1
                if self._ended.is_set():
                    break
            self._ended.wait(UNFINISHED_SECONDS)
        return "some refused" if refused else "left"

    def trailers(self) -> str:
        with self._connect() as connection:
            try:
                connection.sendall(CHUNKED)
                while not self._ended.is_set():
                    connection.sendall(TRAILERS)
            except ConnectionError:
                pass  # The answer may lie there all the same.
            return _status(connection, ANSWER_SECONDS)

    def behind_a_body(self) -> str:
        with self._connect() as connection:
            if next(self._turn) % 2:
                connection.sendall(UPGRADE)
                self._ended.wait(0.1)
                connection.sendall(SMUGGLED)
                answers = connection.recv(1 << 16) + _read_for(connection, 0.5)
                return SMUGGLED_IN if answers.count(b"HTTP/1.1 ") > 1 else "one answer"
            connection.sendall(json_request(COMPLETIONS, SHORT_STREAM, close=False))
            connection.sendall(b"\r\n")
            data = b""
            while b"[DONE]" not in data:
                piece = connection.recv(1 << 16)
                if not piece:
                    return CUT
                data += piece
            return "the stream was whole"

    def _post(self, name: str) -> str:
        with self._connect() as connection:
            with contextlib.suppress(ConnectionError):
                self._send_file(connection, name)
            return _status(connection, ANSWER_SECONDS)

    def _leave(self, name: str) -> str:
        with self._connect() as connection:
            with contextlib.suppress(ConnectionError):
                self._send_file(connection, name)
            return _status(connection, LEAVE_SECONDS)

    def _send(self, data: bytes) -> str:
        with self._connect() as connection:
            connection.sendall(data)
            return _status(connection, ANSWER_SECONDS)

    def _send_file(self, connection: socket.socket, name: str) -> None:
        with (self._folder / name).open("rb") as file:
            connection.sendfile(file)

    def _connect(self, receive_buffer: int | None = None) -> socket.socket:
        connection = socket.socket()
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(ANSWER_SECONDS)
        connection.connect(("127.0.0.1", self._port))
        return connection


def _status(connection: socket.socket, seconds: float) -> str:
    """The status of the answer, or that there was none in this time."""
    connection.settimeout(seconds)
    try:
        head = connection.recv(1 << 12)
    except TimeoutError:
        if seconds == ANSWER_SECONDS:
            raise
        return "left"
    return head.split()[1].decode() if head else "closed"


def _read_for(connection: socket.socket, seconds: float) -> bytes:
    data = b""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        connection.settimeout(left)
        try:
            piece = connection.recv(1 << 16)
        except TimeoutError:
            break
        if not piece:
            break
        data += piece
    return data


def run_hostile(port: int, folder: Path, seconds: float) -> Counter[tuple[str, str]]:
    """The work of the process."""
    return Hostile(port, folder).run(seconds)
