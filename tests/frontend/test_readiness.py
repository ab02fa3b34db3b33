"""What a frontend concludes from what daemon and router tell it, in any order."""

from __future__ import annotations

import itertools
from functools import reduce

import pytest

from frontend.readiness import News, Phase, Readiness, ReadyAnswer, RouterLost
from transport.messages.from_daemon import Drain, InstanceStatus
from transport.messages.generate import ModelInfo
from transport.messages.to_frontend import Serving

SERVING = Serving(ModelInfo(300, 4096, (2,), 10_000))
STARTING = InstanceStatus("starting", "rank 1 loads its weights", 1)
READY = InstanceStatus("ready", "", 2)
DEGRADED = InstanceStatus("degraded", "worker/1 has ended", 3)
DRAINING = InstanceStatus("draining", "", 4)


def after(*news: News) -> Readiness:
    return reduce(Readiness.next_state, news, Readiness())


@pytest.mark.parametrize(
    ("news", "phase", "held"),
    [
        ([], Phase.UNTOLD, 0),
        ([SERVING], Phase.UNTOLD, 0),
        ([STARTING], Phase.CLOSED, 1),
        ([STARTING, SERVING], Phase.CLOSED, 1),
        ([READY], Phase.WAITING, 0),
        ([DEGRADED], Phase.WAITING, 0),
        ([READY, SERVING], Phase.OPEN, 2),
        ([SERVING, READY], Phase.OPEN, 2),
        ([SERVING, READY, DEGRADED], Phase.OPEN, 3),
        ([SERVING, READY, RouterLost()], Phase.WAITING, 2),
        ([SERVING, READY, RouterLost(), DEGRADED], Phase.WAITING, 2),
        ([SERVING, READY, RouterLost(), DEGRADED, SERVING], Phase.OPEN, 3),
        ([SERVING, READY, STARTING], Phase.CLOSED, 1),
        ([DRAINING], Phase.DRAINING, 4),
        ([Drain()], Phase.DRAINING, 0),
        ([READY, Drain()], Phase.DRAINING, 2),
        ([SERVING, Drain(), READY], Phase.DRAINING, 2),
    ],
    ids=str,
)
def test_phases(news, phase, held):
    state = after(*news)
    assert (state.phase, state.held_serial) == (phase, held)


@pytest.mark.parametrize(
    ("news", "ready", "state", "reason"),
    [
        ([], False, "starting", "the instance is starting"),
        ([STARTING, SERVING], False, "starting", "rank 1 loads its weights"),
        ([READY], False, "starting", "the router has no model yet"),
        ([READY, SERVING], True, "ready", ""),
        ([DEGRADED], False, "degraded", "worker/1 has ended"),
        ([DEGRADED, SERVING], False, "degraded", "worker/1 has ended"),
        ([READY, SERVING, Drain()], False, "draining", "the server is shutting down"),
        ([DRAINING], False, "draining", "the server is shutting down"),
    ],
    ids=str,
)
def test_answers(news, ready, state, reason):
    assert after(*news).answer() == ReadyAnswer(ready, state, reason)


def test_only_an_open_frontend_is_ready_and_it_knows_its_model():
    kinds = (STARTING, READY, DEGRADED, DRAINING, SERVING, RouterLost(), Drain())
    for news in itertools.chain.from_iterable(itertools.product(kinds, repeat=n) for n in range(5)):
        state = after(*news)
        if state.answer().ready:
            assert state.phase is Phase.OPEN, news
        if state.phase is Phase.OPEN:
            assert state.model is not None, news
            assert not state.has_lost_router, news
        if Drain() in news:
            assert state.phase is Phase.DRAINING, news


def test_what_daemon_and_router_say_may_cross_on_the_way():
    for one, other in itertools.product(
        (STARTING, READY, DEGRADED, Drain()), (SERVING, RouterLost())
    ):
        assert after(one, other) == after(other, one)
