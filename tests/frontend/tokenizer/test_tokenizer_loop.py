"""What a tokenizer process answers: a prompt it cannot take, and a fault of its own."""

from __future__ import annotations

import threading

import pytest
import zmq

from frontend.tokenizer.errors import PromptError
from frontend.tokenizer.run import TokenizerLoop
from transport.ids import ProcessName, RequestId
from transport.messages.base import Hello
from transport.messages.generate import Encode, RequestFailed
from transport.telemetry.metrics import MetricSet

HELLO = Hello(1, "tokenizer", ProcessName("tokenizer/0"), 1, "hash")


class Dealer:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.can_send = True

    def send(self, message: object, *_frames: object) -> bool:
        self.sent.append(message)
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
    (answer,) = dealer.sent
    assert isinstance(answer, RequestFailed)
    assert (answer.status, answer.code, answer.param) == (status, code, param)
    assert "defect of ours" not in answer.message
    assert ("defect of ours" in caplog.text) == (status == 500)
