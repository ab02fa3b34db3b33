"""What the router says reaches the sequences that it names, whole."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import zmq

from transport.framing import token_frame
from transport.ids import ProcessName, RequestId
from transport.messages.base import Hello, Message
from transport.messages.generate import Cancel, Generate, SamplingParams, Throttle
from transport.messages.to_worker import Start
from transport.telemetry.metrics import MetricSet
from workers.daemon_inbox import DaemonInbox
from workers.engine.fake import FakeEngine, FakeEngineSettings
from workers.scheduling.scheduler import Scheduler
from workers.scheduling.sequence import Sequence
from workers.telemetry import WorkerTelemetry
from workers.worker import Worker

HELLO = Hello(1, "worker", ProcessName("worker/0"), 1, "hash")
GENERATE = Generate(
    SamplingParams(9, seed=7, stop_token_ids=(3,)),
    priority=-4,
    prefix_cache=False,
    cache_salt="salt",
)


class StartedWorker:
    """A worker that has taken three choices of each of two requests."""

    def __init__(self) -> None:
        engine = FakeEngine(FakeEngineSettings(100, 16, 4, 256))
        self.scheduler = Scheduler(engine.info, 512, 1)
        self.sent: list[Message] = []
        """What the router has got."""
        link = SimpleNamespace(tick=lambda: None, set_state=lambda *parts: None)
        self.worker = Worker(
            0, engine, self.scheduler, self, HELLO, DaemonInbox(), link,
            WorkerTelemetry(MetricSet(), engine.info),
        )  # fmt: skip
        for request in "ab":
            for index in range(3):
                start = Start(
                    RequestId(request), index, ProcessName("frontend/1"), 2, GENERATE, 7.5
                )
                self.tell(start, bytes(token_frame([5, 6, 7])))

    def tell(self, message, *frames: bytes) -> None:
        self.worker.on_message(message, [zmq.Frame(frame) for frame in frames])

    can_send = True

    def send(self, message: Message) -> bool:
        """As the socket to the router."""
        self.sent.append(message)
        return True

    def sequences(self) -> dict[str, Sequence]:
        self.scheduler.check_integrity()
        found = {f"{s.key[0]}{s.key[1]}": s for s in self.scheduler._live()}
        return dict(sorted(found.items()))


@pytest.fixture
def started() -> StartedWorker:
    return StartedWorker()


def test_a_sequence_is_what_the_router_started(started):
    defaults = Generate(SamplingParams(1))
    for field in msgspec.structs.fields(Generate):
        assert getattr(GENERATE, field.name) != getattr(defaults, field.name), field.name
    sequences = started.sequences()
    assert list(sequences) == ["a0", "a1", "a2", "b0", "b1", "b2"]
    for sequence in sequences.values():
        assert sequence.generate == GENERATE
        assert (sequence.prompt_len, sequence.arrival) == (2, 7.5)
        assert sequence.frontend == "frontend/1"
        assert np.array_equal(sequence.prompt, [5, 6, 7])
        assert sequence.order[1:3] == (-4, 7.5)
        assert sequence.stop_tokens == {3}
        assert (sequence.prefix.enabled, sequence.prefix.salt) == (False, "salt")


def test_choices_draw_apart_and_the_first_one_as_the_client_has_said(started):
    seeds = [sequence.seed for sequence in started.sequences().values()]
    assert seeds[0] == GENERATE.sampling.seed
    assert len(set(seeds[:3])) == 3
    assert seeds[3:] == seeds[:3], "equal requests get equal answers"


def test_a_sequence_that_can_never_fit_is_refused_with_both_numbers(started):
    prompt = [5] * (16 * 128)
    start = Start(RequestId("c"), 1, ProcessName("frontend/1"), len(prompt), GENERATE, 7.5)
    started.tell(start, bytes(token_frame(prompt)))
    (failed,) = started.sent
    assert (failed.request_id, failed.index, failed.status) == ("c", 1, 400)
    assert "need 2057 tokens" in failed.message and "holds 2048" in failed.message
    assert len(started.sequences()) == 6


def test_what_an_old_router_has_asked_for_is_dropped_with_it(started):
    started.worker.on_router_lost()
    assert started.sequences() == {}


def test_the_end_of_one_choice_ends_no_other(started):
    started.tell(Cancel(RequestId("a"), 1, "client"))
    assert list(started.sequences()) == ["a0", "a2", "b0", "b1", "b2"]


def test_the_end_of_a_request_ends_all_its_choices_and_no_other_request(started):
    started.tell(Cancel(RequestId("a"), cause="client"))
    assert list(started.sequences()) == ["b0", "b1", "b2"]


def test_one_choice_is_paused_and_goes_on(started):
    started.tell(Throttle(RequestId("b"), 2, True))
    assert [name for name, s in started.sequences().items() if s.paused] == ["b2"]
    started.tell(Throttle(RequestId("b"), 2, False))
    assert not any(s.paused for s in started.sequences().values())
