"""What a peer does not take is kept for it, in the order of each request, and sent later."""

from __future__ import annotations

import pytest

from daemon.router.outbox import Outbox, Outgoing
from transport.ids import ProcessName, RequestId
from transport.messages.base import Message
from transport.messages.generate import Cancel, StageTimes, Throttle, TokenBatch
from transport.messages.to_frontend import Finished, Serving

PEER = ProcessName("worker/0")
OTHER = ProcessName("frontend/0")


class Socket:
    """Takes as many messages as there is room for."""

    def __init__(self) -> None:
        self.room = 0
        self.sent: list[tuple[ProcessName, Message]] = []

    def send(self, peer, message, *frames) -> bool:
        if peer == PEER and not self.room:
            return False
        self.room -= peer == PEER
        self.sent.append((peer, message))
        return True


@pytest.fixture
def socket() -> Socket:
    return Socket()


@pytest.fixture
def outbox(socket) -> Outbox:
    return Outbox(socket)


def throttle(name: str, index: int = 0) -> Outgoing:
    return Outgoing(PEER, Throttle(RequestId(name), index, True))


def tokens(peer: ProcessName) -> Outgoing:
    return Outgoing(peer, TokenBatch(peer, 1, [RequestId("a")], [0], [1], [0]))


def test_nothing_is_lost_and_each_request_keeps_its_order(outbox, socket):
    items = [throttle("a", 0), throttle("b", 0), throttle("a", 1), throttle("b", 1)]
    assert [outbox.send(item) for item in items] == ["kept"] * 4
    socket.room = 3
    sent = list(outbox.retry())
    assert outbox.num_kept == 1
    socket.room = 9
    assert outbox.send(throttle("b", 2)) == "kept", "it must not overtake"
    sent += outbox.retry()
    assert [message for _, message in socket.sent] == [item.message for item in sent]
    for name, count in (("a", 2), ("b", 3)):
        order = [item.message.index for item in sent if item.message.request_id == name]
        assert order == list(range(count))
    assert outbox.send(throttle("c")) == "sent"
    assert outbox.num_kept == 0


def test_one_that_does_not_read_holds_up_nobody_else(outbox, socket):
    outbox.send(throttle("a"))
    finished = Finished(RequestId("a"), StageTimes(), 0)
    assert outbox.send(Outgoing(OTHER, finished)) == "sent"
    assert socket.sent == [(OTHER, finished)]


def test_tokens_are_not_kept(outbox, socket):
    assert outbox.send(tokens(PEER)) == "lost"
    assert outbox.num_kept == 0
    outbox.send(throttle("a"))
    assert outbox.send(tokens(PEER)) == "lost"
    socket.room = 1
    assert outbox.send(tokens(PEER)) == "sent"


def test_a_cancelled_request_leaves_only_its_cancel(outbox, socket):
    outbox.send(throttle("a"))
    outbox.send(throttle("b"))
    outbox.send(Outgoing(PEER, Cancel(RequestId("b"), 0, "stop")))
    outbox.send(Outgoing(PEER, Cancel(RequestId("b"))))
    socket.room = 9
    assert [type(item.message) for item in outbox.retry()] == [Throttle, Cancel]


def test_a_peer_that_is_gone_gets_nothing_of_what_was_kept(outbox, socket):
    outbox.send(throttle("a"))
    outbox.send(Outgoing(PEER, Serving(None)))
    outbox.forget(PEER)
    socket.room = 9
    assert list(outbox.retry()) == []
    assert outbox.send(throttle("b")) == "sent"
