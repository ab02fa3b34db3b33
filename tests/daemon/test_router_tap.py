"""The router's tap and a tapper, over a real socket; the test is the router."""

from __future__ import annotations

import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from daemon.cli.inspect.tap import tap_text
from daemon.errors import DeepInferError
from daemon.inspection import tap_client
from daemon.inspection.tap_client import TapClient
from daemon.router.tap import BODY_BYTES, TAP_QUEUE, Tap
from daemon.system.run_directory import RunDirectory
from transport.framing import encode_header, token_frame
from transport.ids import ProcessName, RequestId
from transport.messages.from_daemon import PeerLost
from transport.messages.generate import Encode, Encoded, Generate, SamplingParams, TokenBatch
from transport.messages.to_router import Submit
from transport.sockets import Endpoints, Received

SECONDS = 20.0
TOKENIZER = ProcessName("tokenizer/0")
FRONTEND = ProcessName("frontend/0")


class Bench:
    """A tap, and tappers that it has noticed."""

    def __init__(self, run_dir) -> None:
        self.run_dir = run_dir
        self.clients: list[TapClient] = []
        self.open()

    def open(self) -> None:
        self.context = zmq.Context()
        self.tap = Tap(self.context, Endpoints(str(self.run_dir)).tap)

    def close_tap(self) -> None:
        self.tap.close()
        self.context.term()

    def listen(self) -> None:
        assert self.tap.socket.poll(SECONDS * 1000), "no subscription came"
        self.tap.listen()

    def client(self, bodies: bool = False) -> TapClient:
        with ThreadPoolExecutor(1) as pool:
            opening = pool.submit(TapClient, self.run_dir, "default", bodies)
            self.listen()
            client = opening.result(SECONDS)
        self.clients.append(client)
        return client

    def send(self, number: int, ids=(1, 2, 3)) -> None:
        message = Encoded(RequestId(f"r{number}"))
        self.tap.saw_outgoing(FRONTEND, message, [token_frame(ids)])

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.close_tap()


@pytest.fixture
def short_path():
    """A folder whose path leaves room for a socket's name."""
    folder = Path(tempfile.mkdtemp(prefix="di-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def bench(short_path):
    directory = RunDirectory.lock(short_path / "run", "default")
    bench = Bench(short_path / "run")
    yield bench
    bench.close()
    directory.close()


def take(client: TapClient, count: int):
    found = []
    deadline = time.monotonic() + SECONDS
    while len(found) < count:
        assert time.monotonic() < deadline, f"only {len(found)} of {count} came"
        found += client.take()
    return found


def test_it_is_open_only_while_somebody_taps(bench):
    assert not bench.tap.is_open
    first, second = bench.client(), bench.client()
    assert bench.tap.is_open
    first.close()
    second.close()
    bench.listen()
    assert not bench.tap.is_open


def test_headers_tell_who_what_and_how_large_but_no_text(bench):
    client = bench.client()
    message = Encode(RequestId("r1"), "text")
    header = encode_header(message)
    frames = [zmq.Frame(b"private words")]
    bench.tap.saw_incoming(Received(message, zmq.Frame(header), frames, FRONTEND))
    (report,) = take(client, 1)
    assert (report.sender, report.receiver, report.message) == ("frontend/0", "router", "Encode")
    assert (report.request_ids, report.lost) == (["r1"], 0)
    assert (report.header_bytes, report.payload_bytes) == (len(header), len(b"private words"))
    assert (report.header, report.payload) == (None, [])


def test_bodies_are_for_those_who_ask_for_them(bench):
    plain, curious = bench.client(), bench.client(bodies=True)
    bench.tap.saw_outgoing(TOKENIZER, Encode(RequestId("r1"), "text"), [b"words \x1b[31m"])
    bench.send(2, [7, 8])
    assert all(report.payload == [] for report in take(plain, 2))
    text, tokens = take(curious, 2)
    assert text.header == {
        "request_id": "r1", "kind": "text", "add_special_tokens": True, "affinity": "",
    }  # fmt: skip
    assert text.payload == ["words \x1b[31m"]
    assert tokens.payload == ["7 8"]
    # On a terminal, a user's text stays text.
    assert "\x1b" not in tap_text(text).plain


def test_long_payloads_are_cut(bench):
    client = bench.client(bodies=True)
    bench.send(1, range(10_000))
    submit = Submit(RequestId("r2"), "text", Generate(SamplingParams(1)), 0.0)
    bench.tap.saw_outgoing(TOKENIZER, submit, [b"x" * (BODY_BYTES + 1)])
    tokens, text = take(client, 2)
    shown, note = tokens.payload[0].split(" … ")
    assert [int(word) for word in shown.split()] == list(range(BODY_BYTES // 4))
    assert note == f"{40_000 - BODY_BYTES} bytes more"
    assert text.payload == ["x" * BODY_BYTES + " … 1 bytes more"]
    assert text.payload_bytes == BODY_BYTES + 1


def test_messages_with_many_requests_or_none(bench):
    client = bench.client()
    ids = [RequestId(f"r{i}") for i in range(5)]
    batch = TokenBatch(FRONTEND, 1, ids, [0] * 5, [1] * 5, [0] * 5)
    bench.tap.saw_outgoing(FRONTEND, batch, [token_frame(range(5))])
    bench.tap.saw_outgoing(FRONTEND, PeerLost(TOKENIZER), [])
    many, none = take(client, 2)
    assert many.request_ids == ids
    assert "r0 r1 r2 and 2 more" in tap_text(many).plain
    assert (none.request_ids, none.payload_bytes) == ([], 0)


def test_a_slow_tapper_loses_messages_and_is_told_how_many(bench):
    client = bench.client()
    sent = 20 * (TAP_QUEUE + tap_client.QUEUE)
    for number in range(sent):
        bench.send(number)  # never waits
    reports = []
    while batch := client.take():
        reports += batch
    assert TAP_QUEUE <= len(reports) < sent
    bench.send(sent)  # the gap shows with the next message
    reports += take(client, 1)
    assert reports[-1].request_ids == [f"r{sent}"]
    assert len(reports) + sum(report.lost for report in reports) == sent + 1
    assert reports[-1].lost > 0
    assert "messages lost" in tap_text(reports[-1]).plain


def test_who_joins_later_has_lost_nothing(bench):
    early = bench.client()
    bench.send(1)
    late = bench.client()
    bench.send(2)
    assert [report.lost for report in take(early, 2)] == [0, 0]
    (report,) = take(late, 1)
    assert (report.request_ids, report.lost) == (["r2"], 0)


def until(client: TapClient, done) -> list:
    """What comes until `done()`."""
    found = []
    for _ in range(200):
        found += client.take()
        if done():
            return found
    pytest.fail("in vain")


def test_a_router_that_is_restarted_is_tapped_again_and_the_user_is_told(bench):
    client = bench.client()
    for number in range(3):
        bench.send(number)
    take(client, 3)
    assert client.notices() == []
    bench.close_tap()
    notices = []
    until(client, lambda: notices.extend(client.notices()) or notices)
    assert len(notices) == 1 and "router has ended" in notices[0]

    bench.open()
    until(client, lambda: bench.tap.socket.poll(0))  # subscribes anew while it waits
    bench.listen()
    for number in range(3, 9):  # the new router counts from the start, to more than the old one did
        bench.send(number)
    reports = take(client, 6)
    assert [report.request_ids for report in reports] == [[f"r{i}"] for i in range(3, 9)]
    assert sum(report.lost for report in reports) == 0
    assert client.notices() == ["The next router is tapped."]


def test_a_router_that_does_not_answer_is_told(bench, monkeypatch):
    monkeypatch.setattr(tap_client, "OPEN_SECONDS", 0.3)
    with pytest.raises(DeepInferError, match="router has not answered"):
        TapClient(bench.run_dir, "default", bodies=False)


def test_without_an_instance_it_says_so(short_path):
    with pytest.raises(DeepInferError, match="start"):
        TapClient(short_path, "default", bodies=False)
