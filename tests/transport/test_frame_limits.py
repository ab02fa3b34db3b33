"""A frame larger than its link may carry costs its sender the connection, and nobody else anything."""

from __future__ import annotations

import pytest
import zmq

from daemon.router.tap import Tap
from transport.frame_limits import REPORT_BYTES, prompt_frame_bytes
from transport.ids import ProcessName
from transport.messages.any import ANY_MESSAGE
from transport.messages.base import Hello, Welcome
from transport.sockets import (
    DealerSocket,
    FrameTooLargeError,
    PublisherSocket,
    RouterSocket,
    SubscriberSocket,
)

LIMIT = 1 << 20
NAME = ProcessName("frontend/0")
HELLO = Hello(1, "frontend", NAME, 1, "hash")


@pytest.fixture
def router(context, endpoints) -> RouterSocket:
    return RouterSocket(context, endpoints.router, ANY_MESSAGE, LIMIT)


def test_who_sends_too_much_is_disconnected_and_the_others_are_heard(
    context, endpoints, router, connect, receive
):
    flood = context.socket(zmq.DEALER)
    flood.setsockopt(zmq.LINGER, 0)
    flood.setsockopt(zmq.RECONNECT_IVL, -1)
    events = flood.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    flood.connect(endpoints.router)
    flood.send_multipart([b"x", bytes(LIMIT + 1)])
    assert events.poll(5000)
    flood.disable_monitor()
    events.close(0)
    dealer = connect(NAME)
    dealer.send(HELLO, bytes(LIMIT))
    (received,) = receive(router)
    assert received.message == HELLO
    assert len(received.frames[0]) == LIMIT
    assert router.stats().received == 1


def test_the_sender_is_told_before_it_loses_its_connection(context, endpoints, router, receive):
    dealer = DealerSocket(context, endpoints.router, NAME, ANY_MESSAGE, LIMIT)
    with pytest.raises(FrameTooLargeError) as caught:
        dealer.send(HELLO, bytes(LIMIT + 1))
    assert caught.value.limit == LIMIT
    # The limit is a frame's, as ZMQ has it.
    dealer.send(HELLO, bytes(LIMIT), bytes(LIMIT))
    assert len(receive(router)[0].frames) == 2
    with pytest.raises(FrameTooLargeError):
        router.send(NAME, Welcome(), bytes(LIMIT + 1))
    assert router.send(NAME, Welcome())
    assert receive(dealer)[0].message == Welcome()


def test_every_socket_has_a_limit(context, endpoints):
    sockets = [
        RouterSocket(context, endpoints.control, ANY_MESSAGE),
        DealerSocket(context, endpoints.control, NAME, ANY_MESSAGE),
        SubscriberSocket(context, endpoints.telemetry, 10),
        PublisherSocket(context, endpoints.telemetry, 10),
        Tap(context, endpoints.tap),
    ]
    found = [socket.socket.getsockopt(zmq.MAXMSGSIZE) for socket in sockets]
    assert found == [REPORT_BYTES] * 3 + [256] * 2


@pytest.mark.parametrize("body", [1_000, 32_000_000, 500_000_000])
def test_the_largest_body_of_token_ids_fits(body):
    ids = (body - 1) // 2  # "[1,1,...]"
    assert 4 * ids <= prompt_frame_bytes(body) <= max(2.1 * body, REPORT_BYTES)
