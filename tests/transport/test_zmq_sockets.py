"""Sockets say when a peer does not read or is not there, and let a restarted peer take over."""

from __future__ import annotations

import pytest
import zmq

from transport.framing import BadMessage, encode_header
from transport.ids import ProcessName, RequestId
from transport.messages.any import ANY_MESSAGE
from transport.messages.base import Hello, Welcome
from transport.messages.generate import Cancel, Encoded
from transport.sockets import IPC_PATH_MAX_BYTES, DealerSocket, Endpoints

HELLO = Hello(1, "worker", ProcessName("worker/0"), 1, "hash")
WORKER = ProcessName("worker/0")
FAR_TOO_MANY = 2_000_000


def fill(send) -> int:
    """Send until refused; how many were taken."""
    for count in range(FAR_TOO_MANY):
        if not send():
            return count
    pytest.fail("a peer that does not read can be sent messages without end")


def test_messages_and_frames_arrive_both_ways(router, connect, receive):
    dealer = connect("worker/0")
    assert dealer.send(Encoded(RequestId("a")), b"1234", memoryview(b"5678"))
    (received,) = receive(router)
    assert received.message == Encoded(RequestId("a"))
    assert received.peer == WORKER
    assert [bytes(frame) for frame in received.frames] == [b"1234", b"5678"]
    assert router.send(WORKER, Welcome(), b"x" * 200_000)
    (answer,) = receive(dealer)
    assert answer.message == Welcome()
    assert len(answer.frames[0]) == 200_000


def test_forwarding_changes_nothing(router, connect, receive):
    sender, target = connect("worker/0"), connect("frontend/0")
    target.send(HELLO)
    receive(router)
    sender.send(Cancel(RequestId("a"), 3, "stop"), b"frame", b"")
    (received,) = receive(router)
    assert router.forward(ProcessName("frontend/0"), received)
    (found,) = receive(target)
    assert bytes(found.header) == encode_header(Cancel(RequestId("a"), 3, "stop"))
    assert [bytes(frame) for frame in found.frames] == [b"frame", b""]


def test_an_unknown_peer_is_an_error_not_silence(router):
    assert not router.send(ProcessName("worker/7"), Welcome())
    assert router.stats().refused == 1
    assert router.stats().sent == 0


def test_a_peer_that_has_left_is_an_error(router, connect, receive):
    dealer = connect("worker/0")
    dealer.send(HELLO)
    receive(router)
    dealer.close()
    fill(lambda: router.send(WORKER, Welcome()))
    assert router.stats().refused == 1


def test_a_full_queue_refuses_and_takes_again_once_it_is_read(router, connect, receive):
    dealer = connect("worker/0")
    dealer.send(HELLO)
    receive(router)
    taken = fill(lambda: router.send(WORKER, Cancel(RequestId("a"))))
    assert taken >= 20_000
    receive(dealer, taken)
    assert router.send(WORKER, Cancel(RequestId("last")))
    assert receive(dealer)[0].message == Cancel(RequestId("last"))


def test_a_dealer_whose_router_does_not_read_refuses(router, connect):
    dealer = connect("worker/0")
    assert dealer.can_send
    taken = fill(lambda: dealer.send(HELLO))
    assert taken >= 20_000
    assert not dealer.can_send
    assert dealer.stats().refused == 1
    assert dealer.stats().sent == taken


def test_without_a_router_messages_wait_up_to_the_mark(context, endpoints):
    dealer = DealerSocket(context, endpoints.router, WORKER, ANY_MESSAGE)
    assert fill(lambda: dealer.send(HELLO)) >= 20_000


def test_a_restarted_peer_takes_over_its_name(context, endpoints, router, connect, receive):
    # Its predecessor is not known to be gone, and would not come back.
    old = context.socket(zmq.DEALER)
    old.setsockopt(zmq.IDENTITY, WORKER.encode())
    old.setsockopt(zmq.RECONNECT_IVL, -1)
    old.connect(endpoints.router)
    old.send(encode_header(HELLO))
    receive(router)
    new = connect("worker/0")
    new.send(HELLO)
    receive(router)
    assert router.send(WORKER, Welcome())
    assert receive(new)[0].message == Welcome()  # and so the other one has not got it


def test_an_undecodable_message_is_told_and_the_next_one_comes(router, connect, receive):
    dealer = connect("worker/0")
    dealer.socket.send(b"\xc1")
    dealer.send(HELLO)
    with pytest.raises(BadMessage):
        receive(router, 2)
    assert receive(router)[0].message == HELLO


def test_many_undecodable_messages_cost_one_line_and_no_traceback(router, connect, receive, caplog):
    dealer = connect("worker/0")
    for _ in range(50):
        dealer.socket.send(b"\xc1")
    dealer.send(HELLO)
    came = []
    while not came:
        assert router.socket.poll(10_000)
        router.receive(came.append)
    (line,) = caplog.records
    assert line.getMessage().startswith("dropped a message that cannot be read: not a message of")
    assert line.exc_info is None


def test_drain_takes_no_more_than_asked(router, connect, receive):
    dealer = connect("worker/0")
    for _ in range(5):
        dealer.send(HELLO)
    receive(router)
    assert router.socket.poll(1000)
    assert len(list(router.drain(3))) <= 3


def test_traffic_is_counted(router, connect, receive):
    dealer = connect("worker/0")
    dealer.send(HELLO, b"12345")
    receive(router)
    size = len(encode_header(HELLO)) + 5
    assert (dealer.stats().sent, dealer.stats().sent_bytes) == (1, size)
    assert router.stats().received == 1
    assert router.stats().received_bytes == size + len(b"worker/0")
    assert router.stats().name == "router"


def test_too_long_a_path_is_told_with_its_length():
    room = IPC_PATH_MAX_BYTES - len("/telemetry.sock")
    assert Endpoints("/" + "x" * (room - 1)).path_problem() is None
    problem = Endpoints("/" + "x" * room).path_problem()
    assert problem is not None
    assert str(IPC_PATH_MAX_BYTES + 1) in problem
    assert "--run-dir" in problem


def test_the_kernel_agrees_on_the_longest_path(context, endpoints):
    folder = endpoints.run_dir
    longest = f"{folder}/" + "x" * (IPC_PATH_MAX_BYTES - len(folder) - 1)
    context.socket(zmq.ROUTER).bind(f"ipc://{longest}")
    with pytest.raises(zmq.ZMQError):
        context.socket(zmq.ROUTER).bind(f"ipc://{longest}x")
