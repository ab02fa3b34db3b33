"""The chaos run excuses an error only by the loss that made it."""

from __future__ import annotations

import pytest

from benchmarks.chaos.causes import EARLY_SECONDS, NOTICE_SECONDS, Loss, find_cause
from benchmarks.clients.requests import Answer, Asked, Failure

LOST_AT = 100.0


def make_loss(name: str = "frontend/0", **fields) -> Loss:
    """Killed at 100; whoever it was, a request sent then succeeds at 105."""
    values = {"ended_at": LOST_AT, "served_after": 5.0, **fields}
    return Loss(name, 1234, frozen=False, state="ready", at=LOST_AT, **values)


def make_failure(began: float, ended: float, **answer) -> Failure:
    return Failure(Asked("/v1/completions", {}), Answer(**answer), began, ended)


BROKEN = {"status": 200}
LOST = {"status": 503, "error": "router_lost"}
CLOSED = {"status": 503, "error": "not_ready"}


@pytest.mark.parametrize("status", [0, 200])
def test_a_connection_breaks_when_a_frontend_ends(status):
    loss = make_loss()
    assert find_cause(make_failure(99.0, 100.2, status=status), [loss]) is loss


@pytest.mark.parametrize(
    ("began", "ended"),
    [(98.0, LOST_AT - 2 * EARLY_SECONDS), (99.0, LOST_AT + 2 * NOTICE_SECONDS), (100.1, 100.2)],
    ids=["broken before", "broken long after", "sent after"],
)
def test_a_connection_that_breaks_at_another_time_is_unexplained(began, ended):
    assert find_cause(make_failure(began, ended, **BROKEN), [make_loss()]) is None


def test_a_frozen_frontend_breaks_connections_when_it_is_killed_and_not_before():
    loss = make_loss(ended_at=103.0)
    assert find_cause(make_failure(99.0, 100.5, **BROKEN), [loss]) is None
    assert find_cause(make_failure(101.0, 103.1, **BROKEN), [loss]) is loss
    assert find_cause(make_failure(101.0, 103.1, **BROKEN), [make_loss(ended_at=None)]) is None


@pytest.mark.parametrize("status", [200, 503])
def test_requests_at_a_router_fail_when_it_ends(status):
    loss = make_loss("router")
    failure = {"status": status, "error": "router_lost"}
    assert find_cause(make_failure(90.0, 100.3, **failure), [loss]) is loss
    assert find_cause(make_failure(90.0, 100.1 + NOTICE_SECONDS, **failure), [loss]) is None


def test_nobody_is_let_in_until_a_router_serves_again():
    loss = make_loss("router")
    for at, wanted in ((99.9, None), (100.1, loss), (105.0, loss), (105.1 + NOTICE_SECONDS, None)):
        assert find_cause(make_failure(at, at, **CLOSED), [loss]) is wanted
    never = make_loss("router", served_after=None)
    assert find_cause(make_failure(400.0, 400.0, **CLOSED), [never]) is never


@pytest.mark.parametrize("name", ["worker/0", "tokenizer/0"])
@pytest.mark.parametrize("answer", [BROKEN, LOST, CLOSED], ids=["broken", "lost", "closed"])
def test_a_lost_worker_or_tokenizer_excuses_nothing(name, answer):
    assert find_cause(make_failure(99.0, 100.1, **answer), [make_loss(name)]) is None


@pytest.mark.parametrize(
    "answer",
    [
        {"status": 429, "error": "overloaded"},
        {"status": 500, "error": "worker_lost"},
        {"status": 503, "error": "timeout"},
        {"timed_out": True},
    ],
    ids=lambda answer: answer.get("error", "no answer"),
)
def test_nothing_excuses_other_errors(answer):
    losses = [make_loss("frontend/0"), make_loss("router"), make_loss("worker/0")]
    assert find_cause(make_failure(99.0, 100.1, **answer), losses) is None


def test_of_two_losses_the_last_is_blamed():
    first, second = make_loss("frontend/0"), make_loss("frontend/1", ended_at=100.4)
    second.at = 100.4
    assert find_cause(make_failure(99.0, 100.5, **BROKEN), [second, first]) is second
