"""What a tokenizer process answers: a prompt it cannot take, and a fault of its own."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import psutil
import pytest
import zmq

from frontend.tokenizer.encoder import EncodedPrompt
from frontend.tokenizer.errors import PromptError
from frontend.tokenizer.run import TokenizerLoop
from transport.framing import read_tokens
from transport.ids import ProcessName, RequestId
from transport.messages.base import Hello
from transport.messages.generate import Cancel, Encode, Encoded, RequestFailed
from transport.prompt_turns import LONG_PROMPT_BYTES
from transport.telemetry.metrics import MetricSet

HELLO = Hello(1, "tokenizer", ProcessName("tokenizer/0"), 1, "hash")


class Dealer:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.ids: dict[str, list[int]] = {}
        self.can_send = True

    def send(self, message: object, *frames: object) -> bool:
        self.sent.append(message)
        if isinstance(message, Encoded):
            self.ids[message.request_id] = read_tokens(frames[0]).tolist()
        return True


class BrokenEncoder:
    def __init__(self, fault: Exception) -> None:
        self._fault = fault

    def encode_chat(self, _payload: bytes) -> None:
        raise self._fault


@pytest.mark.parametrize(
    ("fault", "status", "code", "param"),
    [
        (PromptError("The roles must alternate.", "messages"), 400, "invalid_prompt", "messages"),
        (RuntimeError("a defect of ours"), 500, "tokenizer_failed", None),
    ],
)
def test_who_is_to_blame(fault, status, code, param, caplog):
    dealer = Dealer()
    loop = TokenizerLoop(BrokenEncoder(fault), dealer, HELLO, threading.Event(), None, MetricSet())
    job = Encode(RequestId("r-1"), "chat")
    loop.on_message(job, [zmq.Frame(b"{}")])
    loop.work()
    (answer,) = dealer.sent
    assert isinstance(answer, RequestFailed)
    assert (answer.status, answer.code, answer.param) == (status, code, param)
    assert "defect of ours" not in answer.message
    assert ("defect of ours" in caplog.text) == (status == 500)


class Encoder:
    """Encodes a text to its length. What begins with a word of `faults` has that done to it first."""

    def __init__(self, **faults: Callable[[], object]) -> None:
        self._faults = faults

    def encode_text(self, text: str, _add_special_tokens: bool) -> EncodedPrompt:
        fault = self._faults.get(text.partition(" ")[0])
        if fault is not None:
            fault()
        return EncodedPrompt(np.array([len(text)], np.int32), 0.0, 0.0)


def test_more_token_ids_than_the_router_takes_are_an_answer_of_their_own():
    class ManyIds(Encoder):
        def encode_text(self, text: str, _add_special_tokens: bool) -> EncodedPrompt:
            return EncodedPrompt(np.zeros(len(text), np.int32), 0.0, 0.0)

    dealer = Dealer()
    loop = TokenizerLoop(ManyIds(), dealer, HELLO, threading.Event(), None, MetricSet(), 40)
    for name, text in (("r-1", "x" * 10), ("r-2", "x" * 11)):
        loop.on_message(Encode(RequestId(name), "text"), [zmq.Frame(text.encode())])
        loop.work()
    assert len(dealer.ids["r-1"]) == 10
    refused = dealer.sent[-1]
    assert isinstance(refused, RequestFailed)
    assert (refused.status, refused.code) == (400, "context_length_exceeded")
    assert "11 tokens" in refused.message


def long(word: str) -> str:
    return f"{word} " + "x" * LONG_PROMPT_BYTES


@pytest.fixture
def blocked() -> Iterator[Callable[[], object]]:
    """What never ends by itself, in whichever process."""
    read_end, write_end = os.pipe()
    yield lambda: os.read(read_end, 1)
    os.close(read_end)
    os.close(write_end)


class Tokenizer:
    """A loop without sockets."""

    def __init__(self, encoder: Encoder) -> None:
        self.dealer = Dealer()
        self._others = {child.pid for child in psutil.Process().children()}
        self.loop = TokenizerLoop(encoder, self.dealer, HELLO, threading.Event(), None, MetricSet())

    def give(self, name: str, text: str) -> None:
        self.loop.on_message(Encode(RequestId(name), "text"), [zmq.Frame(text.encode())])

    def cancel(self, name: str) -> None:
        self.loop.on_message(Cancel(RequestId(name)), [])

    def forks(self) -> list[int]:
        """Pids of those that encode; other tests may have left children of their own."""
        pids = {child.pid for child in psutil.Process().children()}
        return sorted(pids - self._others)

    def work_until_answered(self, count: int) -> list[tuple[str, str]]:
        """(request, kind of answer) of the first answers, in their order."""
        while len(self.dealer.sent) < count:
            self.loop.work()
            if len(self.dealer.sent) < count and not self.loop.has_short:
                assert select.select([self.loop.fork_fd], [], [], 60.0)[0], "no answer"
        return [
            (m.request_id, m.code if isinstance(m, RequestFailed) else "ids")
            for m in self.dealer.sent
        ]


@pytest.fixture
def tokenizer() -> Iterator[Callable[..., Tokenizer]]:
    all_made: list[Tokenizer] = []

    def make(**faults: Callable[[], object]) -> Tokenizer:
        made = Tokenizer(Encoder(**faults))
        all_made.append(made)
        return made

    yield make
    for made in all_made:
        with closing(made.loop):
            pass
        assert not made.forks()


def test_a_long_prompt_is_answered_like_a_short_one(tokenizer):
    one = tokenizer()
    one.give("long", long("a"))
    one.give("short", "abc")
    one.work_until_answered(2)
    assert one.dealer.ids == {"long": [len(long("a"))], "short": [3]}


def test_short_prompts_pass_a_long_one_that_is_being_encoded(tokenizer, blocked):
    one = tokenizer(stuck=blocked)
    one.give("long", long("stuck"))
    one.loop.work()
    for name in ("a", "b"):
        one.give(name, name)
    assert one.work_until_answered(2) == [("a", "ids"), ("b", "ids")]


def test_a_cancelled_prompt_is_not_encoded_any_further(tokenizer, blocked):
    one = tokenizer(stuck=blocked)
    one.give("running", long("stuck"))
    one.give("waiting", long("stuck"))
    one.give("wanted", long("a"))
    one.give("short", "stuck")
    one.cancel("short")
    one.loop.work()
    assert len(one.forks()) == 1
    one.cancel("running")
    assert not one.forks()
    one.cancel("waiting")
    assert one.work_until_answered(4) == [
        ("short", "cancelled"), ("running", "cancelled"), ("waiting", "cancelled"),
        ("wanted", "ids"),
    ]  # fmt: skip
    one.cancel("wanted")
    assert len(one.dealer.sent) == 4, "each prompt is answered once"


@pytest.mark.parametrize(
    "death", [lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: os._exit(0)]
)
def test_a_long_prompt_that_kills_its_process_ends_alone(tokenizer, death):
    one = tokenizer(deadly=death)
    one.give("a", long("deadly"))
    one.give("b", long("b"))
    assert one.work_until_answered(2) == [("a", "tokenizer_failed"), ("b", "ids")]


def test_what_a_lost_router_asked_for_is_dropped(tokenizer, blocked, monkeypatch):
    one = tokenizer(stuck=blocked)
    monkeypatch.setattr(one.loop, "_daemon", type("", (), {"set_state": lambda *_: None})())
    one.give("a", long("stuck"))
    one.loop.work()
    one.give("b", long("b"))
    one.give("c", "c")
    one.loop.on_router_lost()
    one.loop.work()
    assert not one.forks()
    assert one.dealer.sent == []
