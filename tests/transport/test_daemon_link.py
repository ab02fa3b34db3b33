"""A process's line to the daemon: greeted, refused, unanswered; heartbeats while the process hangs."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import zmq

from tests.support.waiting import eventually
from transport.child import ProcessSettings
from transport.framing import decode_header
from transport.ids import ProcessName
from transport.links.daemon import DaemonLink
from transport.links.errors import LinkError
from transport.messages.any import ANY_MESSAGE
from transport.messages.base import PROTOCOL_VERSION, Hello, Refused, Welcome
from transport.messages.control import DumpStacks, SetLogLevel
from transport.messages.from_daemon import Answer, PeerLost
from transport.messages.telemetry import RequestRow, Snapshot
from transport.messages.to_daemon import SNAPSHOTS, CommandDone, FatalError, Query, StateChanged
from transport.sockets import RouterSocket
from transport.stacks import ThreadStack
from transport.telemetry.catalog import CounterMetric
from transport.telemetry.metrics import MetricSet

NAME = ProcessName("worker/0")
SECONDS = 10.0


class Daemon:
    """The other end of the line, driven by the test."""

    def __init__(self, context, endpoints, receive) -> None:
        self.control = RouterSocket(context, endpoints.control, ANY_MESSAGE)
        self.telemetry = context.socket(zmq.SUB)
        self.telemetry.setsockopt(zmq.SUBSCRIBE, b"")
        self.telemetry.bind(endpoints.telemetry)
        self._receive = receive

    def take(self):
        return self._receive(self.control)[0].message

    def snapshot(self) -> Snapshot:
        assert self.telemetry.poll(SECONDS * 1000), "no snapshot came"
        return decode_header(self.telemetry.recv(), SNAPSHOTS)


@pytest.fixture
def daemon(context, endpoints, receive) -> Daemon:
    return Daemon(context, endpoints, receive)


@pytest.fixture
def make_link(context, endpoints):
    """make_link(**settings): a link; what the daemon sends lands in `link.inbox`."""
    links = []

    def make(**changes) -> DaemonLink:
        values = dict(heartbeat_seconds=0.02, connect_seconds=SECONDS)
        settings = ProcessSettings(
            NAME, "worker", "test", endpoints.run_dir, os.getpid(), "hash", **{**values, **changes}
        )
        metrics = MetricSet()
        metrics.counter(CounterMetric("steps", "Steps.")).add(7)
        link = DaemonLink(context, settings, metrics, ANY_MESSAGE)
        link.inbox = []
        links.append(link)
        return link

    yield make
    for link in links:
        link.close()


def hear(link: DaemonLink):
    return lambda message, frames: link.inbox.append((message, frames))


def welcome(daemon: Daemon, link: DaemonLink) -> Hello:
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(link.start, hear(link))
        hello = daemon.take()
        daemon.control.send(NAME, Welcome())
        started.result(SECONDS)
    return hello


def test_it_introduces_itself(daemon, make_link):
    hello = welcome(daemon, make_link())
    assert hello == Hello(PROTOCOL_VERSION, "worker", NAME, os.getpid(), "hash")


def test_a_refusal_has_the_daemons_reason(daemon, make_link):
    link = make_link()
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(link.start, hear(link))
        daemon.take()
        daemon.control.send(NAME, Refused("it speaks protocol 0"))
        with pytest.raises(LinkError, match="refused this process: it speaks protocol 0"):
            started.result(SECONDS)


def test_an_absent_daemon_is_noticed(make_link):
    with pytest.raises(LinkError, match=r"did not answer within 0\.1 s"):
        make_link(connect_seconds=0.1).start(print)


def test_a_daemon_that_starts_later_is_found(context, endpoints, receive, make_link):
    link = make_link()
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(link.start, hear(link))
        assert not Path(endpoints.control.removeprefix("ipc://")).exists()
        late = Daemon(context, endpoints, receive)
        assert isinstance(late.take(), Hello)
        late.control.send(NAME, Welcome())
        started.result(SECONDS)


def test_snapshots_go_on_while_the_main_loop_stands_still(daemon, make_link):
    link = make_link()
    welcome(daemon, link)
    link.set_state("ready", "all well")
    link.tick()
    while daemon.snapshot().progress != 1:
        pass
    standing = [daemon.snapshot() for _ in range(3)]
    assert {snapshot.progress for snapshot in standing} == {1}
    assert standing[-1].state == "ready"
    assert standing[-1].detail == "all well"
    assert standing[-1].counters == {"steps": [((), 7.0)]}
    assert (standing[-1].name, standing[-1].pid) == (NAME, os.getpid())


def test_the_links_own_sockets_are_reported(daemon, make_link):
    welcome(daemon, make_link())
    daemon.snapshot()
    while len(snapshot := daemon.snapshot().sockets) and not snapshot[1].sent:
        pass
    control, telemetry = snapshot
    assert (control.name, telemetry.name) == ("control", "telemetry")
    assert (control.sent, control.received) == (1, 1), "hello and welcome"
    assert telemetry.sent_bytes > telemetry.sent > 0


def test_messages_go_both_ways_with_their_frames(daemon, make_link):
    link = make_link()
    welcome(daemon, link)
    link.set_state("loading", "weights")
    link.post(Query("status", 4))
    assert daemon.take() == StateChanged("loading", "weights")
    assert daemon.take() == Query("status", 4)
    daemon.control.send(NAME, Answer(4), b"{}")
    daemon.control.send(NAME, PeerLost(ProcessName("router")))
    while len(link.inbox) < 2:
        daemon.snapshot()  # bounds the wait
    assert [message for message, _ in link.inbox] == [
        Answer(4), PeerLost(ProcessName("router")),
    ]  # fmt: skip
    assert bytes(link.inbox[0][1][0]) == b"{}"


def test_the_reason_of_an_end_arrives_though_the_process_closes_at_once(daemon, make_link):
    link = make_link()
    welcome(daemon, link)
    link.fatal("the model is gone")
    link.close()
    link.close()
    assert daemon.take() == FatalError("the model is gone")


def test_what_is_said_amid_the_last_turn_arrives_too(daemon, make_link):
    link = make_link(connect_seconds=0.1)
    said = threading.Event()

    def request_rows() -> list[RequestRow]:
        """On the link's thread, after it has sent what was queued."""
        if not said.is_set():
            link.fatal("the model is gone")
            said.set()
            eventually(lambda: link._closing)
        return []

    link.watch(request_rows=request_rows)
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(link.start, hear(link))
        daemon.take()
        assert said.wait(SECONDS)
        link.close()
        assert daemon.take() == FatalError("the model is gone")
        with contextlib.suppress(LinkError):
            started.result(SECONDS)


def test_a_message_that_cannot_be_read_does_not_cut_the_line(daemon, make_link):
    link = make_link()
    welcome(daemon, link)
    daemon.control.socket.send_multipart([NAME.encode(), b"\xc1garbage"])
    daemon.control.send(NAME, PeerLost(ProcessName("router")))
    while not link.inbox:
        daemon.snapshot()
    link.post(Query("status"))
    assert daemon.take() == Query("status")


def test_stacks_are_told_while_the_main_loop_stands_still(daemon, make_link, receive):
    link = make_link()
    welcome(daemon, link)
    daemon.control.send(NAME, DumpStacks(9))
    reply = receive(daemon.control)[0]
    assert reply.message == CommandDone(9)
    threads = msgspec.json.decode(bytes(reply.frames[0].buffer), type=list[ThreadStack])
    assert {"MainThread", "daemon-link"} <= {thread.name for thread in threads}
    main = next(thread for thread in threads if thread.name == "MainThread")
    # This test is the main loop; it hangs in here.
    assert "test_stacks_are_told_while_the_main_loop_stands_still" in {
        frame.function for frame in main.frames
    }
    assert link.inbox == []


def test_the_log_level_is_changed_from_outside(daemon, make_link, receive):
    root = logging.getLogger()
    before = root.level
    welcome(daemon, make_link())
    try:
        for serial, level in enumerate(("debug", "error")):
            daemon.control.send(NAME, SetLogLevel(level, serial))
            assert receive(daemon.control)[0].message == CommandDone(serial)
            assert root.level == getattr(logging, level.upper())
    finally:
        root.setLevel(before)
