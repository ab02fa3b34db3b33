"""Sockets in a short-lived run directory, and bounded waits on them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from transport.ids import ProcessName
from transport.messages.any import ANY_MESSAGE
from transport.sockets import CountingSocket, DealerSocket, Endpoints, Received, RouterSocket

RECEIVE_MS = 5000


@pytest.fixture
def endpoints() -> Iterator[Endpoints]:
    """In a folder whose path leaves room for a socket's name."""
    folder = Path(tempfile.mkdtemp(prefix="di-", dir="/tmp"))
    yield Endpoints(str(folder))
    shutil.rmtree(folder)


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def router(context, endpoints) -> RouterSocket:
    return RouterSocket(context, endpoints.router, ANY_MESSAGE)


@pytest.fixture
def connect(context, endpoints) -> Callable[[str], DealerSocket]:
    """connect("worker/0"): a dealer of that name at the router."""
    return lambda name: DealerSocket(context, endpoints.router, ProcessName(name), ANY_MESSAGE)


@pytest.fixture
def receive() -> Callable[..., list[Received]]:
    """receive(socket, count): that many messages, or the test fails."""

    def take(socket: CountingSocket, count: int = 1) -> list[Received]:
        found: list[Received] = []
        while len(found) < count:
            assert socket.socket.poll(RECEIVE_MS), f"only {len(found)} of {count} messages came"
            found += socket.drain(count - len(found))
        return found

    return take
