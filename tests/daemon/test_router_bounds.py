"""What the router bounds: prompts at tokenizers, what waits, and requests that kill processes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.router.core import RouterCore
from daemon.router.outbox import Outgoing
from tests.support.router import (
    LONG,
    MODEL,
    TOKENIZER,
    TOO_LONG,
    batch,
    encoded,
    messages,
    serving_core,
    starts,
    submit,
    worker,
)
from transport.ids import RequestId
from transport.messages.generate import (
    ALL_CHOICES,
    FINISH_LENGTH,
    RUNNING,
    Cancel,
    Encode,
    RequestFailed,
    Throttle,
)
from transport.messages.to_frontend import Finished
from transport.messages.to_router import WorkerReady


def test_a_cancel_reaches_the_tokenizer():
    core = serving_core()
    submit(core, "a")
    (out,) = core.cancel(Cancel(RequestId("a")), 2.0)
    assert (out.peer, out.message) == (TOKENIZER, Cancel(RequestId("a"), ALL_CHOICES))
    assert encoded(core, "a") == []


def test_a_prompt_that_waited_too_long_at_its_tokenizer_is_encoded_no_further():
    core = serving_core()
    submit(core, "a")
    assert [m.request_id for m in messages(core.tick(100.0), Cancel)] == ["a"]


def given_to_tokenizer(outgoing: list[Outgoing]) -> list[str]:
    return [m.request_id for m in messages(outgoing, Encode)]


def test_a_tokenizer_is_given_so_many_bytes_and_short_prompts_at_any_time():
    core = serving_core(max_waiting=10)
    assert given_to_tokenizer(submit(core, "a", text=LONG)) == ["a"]
    assert given_to_tokenizer(submit(core, "b", text=LONG)) == ["b"]
    assert given_to_tokenizer(submit(core, "c", text=LONG)) == []
    assert given_to_tokenizer(submit(core, "d")) == ["d"]
    assert core.rows()[2].stage == "received"
    assert given_to_tokenizer(encoded(core, "a")) == ["c"]
    core.check_integrity()


def test_a_cancelled_prompt_counts_until_the_tokenizer_has_let_go_of_it():
    core = serving_core(max_waiting=10)
    for name in "abc":
        submit(core, name, text=LONG)
    assert given_to_tokenizer(core.cancel(Cancel(RequestId("a")), 2.0)) == []
    dropped = RequestFailed(RequestId("a"), 499, "cancelled", "x")
    assert given_to_tokenizer(core.encoding_failed(TOKENIZER, dropped, 3.0)) == ["c"]


def test_a_tokenizer_that_answers_nothing_gets_no_more_short_prompts():
    core = serving_core(max_waiting=10_000)
    text = bytes(64 << 10)
    given = 0
    while given_to_tokenizer(submit(core, f"r{given}", text=text)):
        core.cancel(Cancel(RequestId(f"r{given}")), 2.0)
        given += 1
    assert given == 512
    dropped = RequestFailed(RequestId("r0"), 499, "cancelled", "x")
    assert given_to_tokenizer(core.encoding_failed(TOKENIZER, dropped, 3.0)) == ["r512"]


def test_a_prompt_for_which_no_tokenizer_has_room_fails_in_time():
    core = serving_core(stage_seconds=10.0)
    for name in "abc":
        submit(core, name, text=LONG)
    encoded(core, "b")
    submit(core, "d", text=TOO_LONG, now=20.0)
    (failed,) = [m for m in messages(core.tick(30.5), RequestFailed) if m.request_id == "d"]
    assert (failed.status, failed.code) == (503, "timeout")


def test_choices_that_wait_are_bounded_but_not_at_the_cost_of_who_wants_one():
    core = serving_core(max_waiting=10, max_waiting_choices=12)
    assert messages(submit(core, "a", n=10), Encode)
    (refused,) = submit(core, "b", n=3)
    assert (refused.message.status, refused.message.code) == (429, "overloaded")
    assert "10 choices are waiting already" in refused.message.message
    assert messages(submit(core, "c-0", n=1, call="c", call_choices=4), RequestFailed)
    for name in "def":  # more than the limit, but each is one choice
        assert messages(submit(core, name), Encode)
    core.cancel(Cancel(RequestId("a")), 2.0)
    assert messages(submit(core, "b", n=3), Encode)


def test_more_choices_than_may_wait_are_let_in_when_nothing_waits():
    core = serving_core(max_waiting_choices=12)
    assert messages(submit(core, "a", n=13), Encode)


def test_bytes_of_prompts_that_wait_are_bounded_but_short_ones_come_in():
    core = serving_core(max_waiting=10, max_waiting_bytes=2 * len(LONG))
    submit(core, "a", text=LONG)
    submit(core, "b", text=LONG)
    (refused,) = submit(core, "c", text=LONG)
    assert (refused.message.status, refused.message.retry_after) == (429, 3)
    assert "bytes of prompts are waiting already" in refused.message.message
    core.cancel(Cancel(RequestId("b")), 2.0)
    submit(core, "b", text=LONG[4:])
    assert messages(submit(core, "e", n=2, text=b"short"), RequestFailed), "it may be long in all"
    assert messages(submit(core, "d"), Encode)


# ---- prompts that kill ---------------------------------------------------------------------------


def worker_dies(core: RouterCore, now: float = 5.0) -> list[Outgoing]:
    """The only worker dies and another one comes."""
    out = core.peer_lost(worker(0), now)
    return out + core.worker_ready(worker(0), WorkerReady(0, MODEL, 8))


def test_a_killer_is_given_up_after_the_second_worker_and_the_others_are_answered():
    core = serving_core(max_waiting=10, max_migrations=1)
    for name in ("a", "killer", "b"):
        submit(core, name)
        encoded(core, name)
    assert [start.request_id for _, start, _ in starts(worker_dies(core))] == ["a"], "apart"
    out = batch(core, 0, [("a", 0, [1, 2, 3, 4], RUNNING)], started=["a"])
    assert [start.request_id for _, start, _ in starts(out)] == ["killer"]
    submit(core, "new")
    assert starts(encoded(core, "new")), "who is beyond suspicion does not wait"
    out = worker_dies(core)
    (failed,) = messages(out, RequestFailed)
    assert (failed.request_id, failed.status, failed.code) == ("killer", 500, "worker_lost")
    assert {start.request_id for _, start, _ in starts(out)} == {"a", "new", "b"}
    rows = [(name, 0, [9] * 8, FINISH_LENGTH) for name in ("a", "b", "new")]
    assert len(messages(batch(core, 0, rows), Finished)) == 3
    assert core.rows() == []


def test_a_suspect_that_ends_or_is_paused_lets_the_next_one_in():
    core = serving_core(max_waiting=10)
    for name in "abc":
        submit(core, name)
        encoded(core, name)
    worker_dies(core)
    core.cancel(Cancel(RequestId("a")), 6.0)
    assert [start.request_id for _, start, _ in starts(core.tick(6.1))] == ["b"]
    core.throttle(Throttle(RequestId("b"), 0, True))
    assert [start.request_id for _, start, _ in starts(core.tick(6.2))] == ["c"]


def test_suspects_are_tried_at_all_workers_at_once():
    core = serving_core(ranks=3, max_waiting=10, max_migrations=1)
    names = [f"r{i}" for i in range(9)]
    for name in names:
        submit(core, name)
        encoded(core, name)
    moved = starts(core.peer_lost(worker(0), 5.0))
    assert sorted(peer for peer, _, _ in moved) == ["worker/1", "worker/2"]


def tokenizer_dies(core: RouterCore, now: float = 5.0) -> list[Outgoing]:
    out = core.peer_lost(TOKENIZER, now)
    return out + core.peer_joined(TOKENIZER, "tokenizer", now)


def test_a_killer_of_tokenizers_is_given_up_after_the_second():
    core = serving_core(max_waiting=10, max_migrations=1)
    for name in ("killer", "a", "b"):
        submit(core, name)
    assert given_to_tokenizer(tokenizer_dies(core)) == ["killer"]
    assert given_to_tokenizer(submit(core, "new")) == ["new"]
    out = tokenizer_dies(core)
    (failed,) = messages(out, RequestFailed)
    assert (failed.request_id, failed.status, failed.code) == ("killer", 500, "tokenizer_lost")
    assert set(given_to_tokenizer(out)) == {"new", "a"}
    assert starts(encoded(core, "new"))
    assert given_to_tokenizer(encoded(core, "a")) == ["b"]


NAMES = [f"r{i}" for i in range(8)]


@settings(max_examples=100, deadline=None)
@given(
    killers=st.sets(st.sampled_from(NAMES), max_size=3),
    chance=st.randoms(use_true_random=False),
)
def test_killers_take_a_process_together_and_one_each_and_nobody_with_them(killers, chance):
    """Workers that die of a killer as soon as they are given it, whatever is there beside it."""
    core = serving_core(max_waiting=10, max_migrations=1)
    at_worker: set[str] = set()
    failed: list[str] = []
    finished: list[str] = []
    deaths = 0

    def see(out: list[Outgoing]) -> None:
        at_worker.update(start.request_id for _, start, _ in starts(out))
        failed.extend(m.request_id for m in messages(out, RequestFailed))
        finished.extend(m.request_id for m in messages(out, Finished))

    for name in NAMES:
        submit(core, name)
        see(encoded(core, name))
    while core.rows():
        if at_worker & killers:
            at_worker.clear()
            deaths += 1
            see(worker_dies(core))
        else:
            name = chance.choice(sorted(at_worker))
            finish = chance.choice([FINISH_LENGTH, RUNNING])
            see(batch(core, 0, [(name, 0, [1], finish)], [name]))
            at_worker.difference_update(finished)
        core.check_integrity()
    assert set(failed) == killers
    assert deaths == len(killers) + bool(killers)
