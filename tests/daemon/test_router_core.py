"""The router's rules: admission, placement, losses and their clean-up, against simulated peers."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.router.core import RouterCore
from daemon.router.placement import choose, preferred
from tests.support.router import (
    FRONTEND,
    LONG,
    MODEL,
    TOKENIZER,
    TOO_LONG,
    batch,
    encoded,
    generating,
    make_core,
    messages,
    serving_core,
    starts,
    submit,
    worker,
)
from transport.framing import token_frame
from transport.ids import RequestId
from transport.messages.generate import (
    ALL_CHOICES,
    FINISH_LENGTH,
    RUNNING,
    Cancel,
    Encode,
    Generate,
    RequestFailed,
    SamplingParams,
    Throttle,
)
from transport.messages.to_frontend import Finished, Serving
from transport.messages.to_router import SequenceFailed, Submit, WorkerReady
from transport.telemetry.metrics import MetricSet


def test_a_request_goes_through_tokenizer_and_worker_to_its_end():
    core = serving_core()
    assert [item.peer for item in submit(core, "a")] == [TOKENIZER]
    ((peer, start, tokens),) = starts(encoded(core, "a"))
    assert (peer, tokens, start.prompt_len) == (worker(0), [5, 6, 7], 3)
    assert core.rows()[0].stage == "queued"
    out = batch(core, 0, [("a", 0, [9], RUNNING)], started=["a"])
    assert out[0].forward is not None
    assert core.rows()[0].stage == "running"
    out = batch(core, 0, [("a", 0, [4], FINISH_LENGTH)], now=4.0)
    (finished,) = messages(out, Finished)
    assert out[-1].message is finished, "the end comes after the last tokens"
    assert finished.stages.received < finished.stages.tokenizing < finished.stages.queued
    assert finished.stages.queued < finished.stages.running < finished.stages.finished
    assert len(core.rows()) == 0


def test_past_max_waiting_a_request_is_refused_before_any_work():
    core = serving_core(max_waiting=2)
    submit(core, "a")
    submit(core, "b")
    (refused,) = submit(core, "c")
    assert refused.message.status == 429
    assert refused.message.retry_after == 3
    encoded(core, "a")
    batch(core, 0, [("a", 0, [9], RUNNING)], started=["a"])
    assert messages(submit(core, "d"), Encode), "a running request is no waiting one"


def test_the_prompts_of_one_http_request_count_once():
    core = serving_core(max_waiting=2)
    for position in range(5):
        assert messages(submit(core, f"a-{position}", call="a"), Encode)
    assert messages(submit(core, "b"), Encode)
    assert core.num_waiting == 2
    (refused,) = submit(core, "c-0", call="c")
    assert "2 requests are waiting already" in refused.message.message
    for position in range(5):
        encoded(core, f"a-{position}")
    batch(core, 0, [], started=[f"a-{position}" for position in range(4)])
    assert core.num_waiting == 2, "one of its prompts waits still"
    batch(core, 0, [], started=["a-4"])
    assert core.num_waiting == 1
    assert messages(submit(core, "c-0", call="c"), Encode)
    core.check_integrity()


def test_what_was_let_in_is_not_turned_away_by_a_drain_that_begins_amid_its_prompts():
    core = serving_core()
    submit(core, "a-0", call="a")
    core.drain()
    assert messages(submit(core, "a-1", call="a"), Encode)
    assert submit(core, "b")[0].message.code == "shutting_down"


def test_without_a_worker_requests_get_503():
    core = make_core()
    core.peer_joined(FRONTEND, "frontend", 0.0)
    (refused,) = submit(core, "a")
    assert (refused.message.status, refused.message.code) == (503, "not_ready")


def test_a_prompt_too_long_names_both_numbers():
    core = serving_core()
    submit(core, "a")
    (failed,) = messages(encoded(core, "a", ids=range(64)), RequestFailed)
    assert failed.status == 400
    assert failed.code == "context_length_exceeded"
    assert "maximum context length is 64 tokens" in failed.message
    assert "64 tokens" in failed.message
    assert len(core.rows()) == 0


def test_the_output_is_limited_to_the_room_left():
    core = serving_core()
    submit(core, "a", max_tokens=1000)
    ((_, start, _),) = starts(encoded(core, "a"))
    assert start.generate.sampling.max_tokens == 61


def test_what_an_answer_must_have_is_no_more_than_fits():
    core = serving_core()
    wanted = Generate(SamplingParams(max_tokens=1000, min_tokens=500))
    message = Submit(RequestId("a"), "tokens", wanted, 0.0)
    ((_, start, _),) = starts(core.submit(FRONTEND, message, token_frame([1] * 4), 1.0))
    sampling = start.generate.sampling
    assert (sampling.min_tokens, sampling.max_tokens) == (60, 60)


def test_a_prompt_that_fits_into_no_pool_is_refused():
    core = serving_core()
    core.worker_ready(worker(0), WorkerReady(0, msgspec.structs.replace(MODEL, pool_tokens=16), 8))
    submit(core, "a")
    (failed,) = messages(encoded(core, "a", ids=range(16)), RequestFailed)
    assert (failed.status, failed.code) == (400, "context_length_exceeded")
    assert "maximum context length is 16 tokens" in failed.message


def test_token_prompts_skip_the_tokenizer_and_are_checked():
    core = serving_core()
    good = Submit(RequestId("a"), "tokens", generating(1), 0.0)
    assert starts(core.submit(FRONTEND, good, token_frame([1, 2]), 1.0))
    bad = Submit(RequestId("b"), "tokens", generating(1), 0.0)
    (failed,) = messages(core.submit(FRONTEND, bad, token_frame([1, 100]), 1.0), RequestFailed)
    assert (failed.status, failed.param) == (400, "prompt")


def test_an_id_of_the_tokenizer_that_the_model_does_not_know_reaches_no_worker():
    core = serving_core()
    submit(core, "a")
    (failed,) = encoded(core, "a", ids=[5, 100])
    assert (failed.message.status, failed.message.code) == (400, "invalid_token")


def test_a_lost_worker_costs_no_token():
    core = serving_core(ranks=2)
    submit(core, "a", n=2)
    (first, *_) = starts(encoded(core, "a"))
    lost = int(first[0][-1])
    batch(core, lost, [("a", 0, [9, 8], RUNNING), ("a", 1, [3], FINISH_LENGTH)], started=["a"])
    moved = starts(core.peer_lost(worker(lost), 4.0))
    assert [(peer, start.index, tokens) for peer, start, tokens in moved] == [
        (worker(1 - lost), 0, [5, 6, 7, 9, 8])
    ]
    assert (moved[0][1].prompt_len, moved[0][1].arrival) == (3, first[1].arrival)
    assert batch(core, lost, [("a", 0, [1], RUNNING)]) == [], "the dead may not speak"
    assert messages(batch(core, 1 - lost, [("a", 0, [1], FINISH_LENGTH)]), Finished)
    core.check_integrity()


def test_where_a_request_was_before_says_nothing_of_it_any_more():
    core = serving_core(ranks=2)
    submit(core, "a")
    former = int(starts(encoded(core, "a"))[0][0][-1])
    core.peer_lost(worker(former), 4.0)
    core.worker_ready(worker(former), WorkerReady(former, MODEL, 8))
    batch(core, former, [("a", 0, [1], FINISH_LENGTH)])
    batch(core, 1 - former, [("a", 0, [9], RUNNING)])
    ((_, _, tokens),) = starts(core.peer_lost(worker(1 - former), 5.0))
    assert tokens == [5, 6, 7, 9]


def test_the_rank_of_a_request_is_its_arrival_however_long_its_prompt_took():
    core = serving_core()
    message = Submit(RequestId("a"), "text", generating(8), received_at=0.5)
    core.submit(FRONTEND, message, b"text", 1.0)
    ((_, start, _),) = starts(encoded(core, "a", now=40.0))
    assert start.arrival == 0.5


def test_the_end_of_one_choice_reaches_its_worker_and_ends_no_other():
    core = serving_core()
    submit(core, "a", n=2)
    encoded(core, "a")
    (item,) = core.cancel(Cancel(RequestId("a"), 1, "stop"), 3.0)
    assert (item.peer, item.message.request_id, item.message.index) == (worker(0), "a", 1)
    out = core.cancel(Cancel(RequestId("a"), 0, "stop"), 4.0)
    assert [message.index for message in messages(out, Cancel)] == [0]
    assert messages(out, Finished)


def test_with_no_worker_left_a_request_waits_for_the_next_one():
    core = serving_core(ranks=1)
    submit(core, "a")
    encoded(core, "a")
    assert not starts(core.peer_lost(worker(0), 4.0))
    out = core.worker_ready(worker(0), WorkerReady(0, MODEL, 8))
    assert messages(out, Serving)
    assert len(starts(out)) == 1


def test_a_paused_choice_is_paused_where_it_goes_on():
    core = serving_core(ranks=2)
    submit(core, "a", n=3)
    lost = int(starts(encoded(core, "a"))[0][0][-1])
    for index, paused in ((0, True), (1, True), (1, False)):
        assert core.throttle(Throttle(RequestId("a"), index, paused))
    out = core.peer_lost(worker(lost), 4.0)
    told = [item.message for item in out if item.peer == worker(1 - lost)]
    assert [(type(m).__name__, m.index) for m in told] == [
        ("Start", 0), ("Throttle", 0), ("Start", 1), ("Start", 2),
    ]  # fmt: skip
    assert told[1].paused


def test_a_choice_that_is_paused_while_no_worker_has_it_starts_paused():
    core = serving_core()
    submit(core, "a")
    encoded(core, "a")
    core.peer_lost(worker(0), 4.0)
    assert core.throttle(Throttle(RequestId("a"), 0, True)) == []
    out = core.worker_ready(worker(0), WorkerReady(0, MODEL, 8))
    assert [m.paused for m in messages(out, Throttle)] == [True]


def lose_again_and_again(core: RouterCore, times: int) -> None:
    for _ in range(times):
        core.peer_lost(worker(0), 5.0)


def test_a_worker_that_loads_is_waited_for_longer_than_for_a_stage():
    core = serving_core(stage_seconds=10.0, start_seconds=100.0)
    submit(core, "a")
    encoded(core, "a")
    core.peer_lost(worker(0), 4.0)
    assert not messages(core.tick(4.0 + 99.0), RequestFailed)
    assert messages(submit(core, "b"), Encode), "who comes meanwhile waits as well"
    (failed,) = messages(core.tick(4.0 + 101.0), RequestFailed)[:1]
    assert (failed.status, failed.code) == (503, "timeout")
    assert "100 s for a worker" in failed.message


def test_workers_that_keep_dying_are_not_waited_for_that_long():
    core = serving_core(stage_seconds=10.0, start_seconds=100.0)
    submit(core, "a")
    encoded(core, "a")
    lose_again_and_again(core, 4)
    assert not messages(core.tick(5.0 + 9.0), RequestFailed)
    (failed,) = messages(core.tick(5.0 + 11.0), RequestFailed)
    assert "10 s for a worker" in failed.message


def test_deaths_before_it_served_count_only():
    core = serving_core(stage_seconds=10.0, start_seconds=100.0)
    lose_again_and_again(core, 4)
    core.worker_ready(worker(0), WorkerReady(0, MODEL, 8))
    submit(core, "a")
    encoded(core, "a")
    core.peer_lost(worker(0), 20.0)
    assert not messages(core.tick(40.0), RequestFailed)


def test_where_no_worker_will_come_nobody_waits():
    core = serving_core(ranks=2)
    submit(core, "a")
    encoded(core, "a")
    core.peer_lost(worker(0), 4.0, comes_back=False)
    assert not messages(core.tick(4.1), RequestFailed)
    core.peer_lost(worker(1), 5.0, comes_back=False)
    (failed,) = messages(core.tick(5.1), RequestFailed)
    assert (failed.status, failed.code) == (503, "not_ready")
    (refused,) = messages(submit(core, "b"), RequestFailed)
    assert (refused.status, refused.code) == (503, "not_ready")


def test_where_no_tokenizer_will_come_nobody_waits():
    core = serving_core()
    submit(core, "a")
    core.peer_lost(TOKENIZER, 4.0)
    assert not messages(core.tick(90.0), RequestFailed), "another one is being started"
    core.peer_lost(TOKENIZER, 91.0, comes_back=False)
    (failed,) = messages(core.tick(91.1), RequestFailed)
    assert failed.status == 503


def test_a_dead_worker_cannot_fail_what_runs_elsewhere():
    core = serving_core(ranks=2)
    submit(core, "a")
    lost = int(starts(encoded(core, "a"))[0][0][-1])
    failure = SequenceFailed(RequestId("a"), 0, 500, "x", "y")
    core.peer_lost(worker(lost), 4.0)
    assert core.sequence_failed(worker(lost), failure) == []
    assert len(core.rows()) == 1
    core.worker_ready(worker(lost), WorkerReady(lost, MODEL, 8))
    assert core.sequence_failed(worker(lost), failure) == [], "nor its successor"
    assert messages(core.sequence_failed(worker(1 - lost), failure), RequestFailed)
    assert core.rows() == []


def test_what_a_lost_rank_could_hold_no_longer_counts():
    core = make_core(workers=2)
    core.peer_joined(FRONTEND, "frontend", 0.0)
    small = msgspec.structs.replace(MODEL, pool_tokens=16)
    core.worker_ready(worker(0), WorkerReady(0, MODEL, 8))
    out = core.worker_ready(worker(1), WorkerReady(1, small, 8))
    assert [m.model.pool_tokens for m in messages(out, Serving)] == [16]
    out = core.peer_lost(worker(1), 1.0)
    assert [m.model.pool_tokens for m in messages(out, Serving)] == [64]
    assert messages(core.peer_lost(worker(0), 2.0), Serving) == [], "it is said to come back"


def test_a_peer_may_join_twice():
    """It greets a router that it takes for two."""
    core = serving_core()
    submit(core, "a")
    core.peer_joined(TOKENIZER, "tokenizer", 2.0)
    core.check_integrity()
    encoded(core, "a")
    core.worker_ready(worker(0), WorkerReady(0, MODEL, 8))
    core.check_integrity()
    assert messages(batch(core, 0, [("a", 0, [1], FINISH_LENGTH)], ["a"]), Finished)


def test_a_request_whose_tokens_are_lost_ends():
    core = serving_core()
    submit(core, "a", n=2)
    submit(core, "b")
    encoded(core, "a")
    encoded(core, "b")
    (item, *_) = batch(core, 0, [("a", 0, [1], RUNNING)], started=["a"])
    out = core.tokens_lost(item.header)
    assert [(m.request_id, m.code) for m in messages(out, RequestFailed)] == [("a", "tokens_lost")]
    assert [(m.request_id, m.index, m.cause) for m in messages(out, Cancel)] == [
        ("a", ALL_CHOICES, "failed"),
    ]
    assert [row.request_id for row in core.rows()] == ["b"]


def test_a_request_is_given_up_after_too_many_lost_workers():
    core = serving_core(ranks=1, max_migrations=1)
    submit(core, "a")
    encoded(core, "a")
    core.peer_lost(worker(0), 4.0)
    core.worker_ready(worker(0), WorkerReady(0, MODEL, 8))
    (failed,) = messages(core.peer_lost(worker(0), 6.0), RequestFailed)
    assert failed.status == 500
    assert len(core.rows()) == 0


def test_a_lost_tokenizer_costs_only_time():
    core = serving_core()
    submit(core, "a")
    assert core.peer_lost(TOKENIZER, 2.0) == []
    (again,) = core.peer_joined(TOKENIZER, "tokenizer", 3.0)
    assert isinstance(again.message, Encode)
    assert again.frames == (b"text",)


def test_a_lost_frontend_takes_its_requests_along():
    core = serving_core()
    submit(core, "a")
    encoded(core, "a")
    (cancel,) = messages(core.peer_lost(FRONTEND, 3.0), Cancel)
    assert cancel.index == ALL_CHOICES
    assert len(core.rows()) == 0
    assert batch(core, 0, [("a", 0, [9], RUNNING)], started=["a"]) == []  # of a step under way


def test_what_no_process_takes_fails_in_time():
    core = serving_core(stage_seconds=5.0)
    submit(core, "a")
    assert not messages(core.tick(5.9), RequestFailed)
    (failed,) = messages(core.tick(6.1), RequestFailed)
    assert failed.status == 503
    assert failed.retry_after == 3


def test_affinity_keeps_a_conversation_on_one_rank_until_that_is_overloaded():
    loads = dict.fromkeys(range(8), 0)
    home, passed = choose("talk", loads)
    assert not passed
    assert choose("talk", {**loads, (home + 1) % 8: 9}) == (home, False)
    rank, passed = choose("talk", {**loads, home: 20})
    assert passed
    assert rank != home
    assert {preferred(f"talk {number}", loads) for number in range(100)} == set(loads)
    without_another = {r: 0 for r in loads if r != (home + 1) % 8}
    assert preferred("talk", without_another) == home


def test_one_of_two_ranks_can_be_overloaded_and_a_single_one_cannot():
    home, _ = choose("talk", {0: 0, 1: 0})
    other = 1 - home
    assert choose("talk", {home: 10, other: 3}) == (home, False)
    assert choose("talk", {home: 11, other: 3}) == (other, True)
    assert choose("talk", {0: 1000}) == (0, False)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_random_lives_and_losses_leave_nothing_behind(data):
    core = serving_core(ranks=2, max_waiting=6)
    names = [f"r{i}" for i in range(6)]
    alive = {0, 1}
    for turn in range(data.draw(st.integers(1, 40))):
        now = 1.0 + turn
        name = data.draw(st.sampled_from(names))
        rank = data.draw(st.integers(0, 1))
        action = data.draw(st.sampled_from(
            [
                "submit", "encoded", "token", "end", "cancel", "stop", "lose", "back", "fail", "tick",
                "lose tokenizer", "tokenizer back", "not encoded", "throttle",
            ]
        ))  # fmt: skip
        if action == "submit":
            call = data.draw(st.sampled_from(["", "c"]))
            text = data.draw(st.sampled_from([b"text", LONG, TOO_LONG]))
            submit(core, name, n=data.draw(st.integers(1, 3)), call=call, text=text)
        elif action == "lose tokenizer":
            core.peer_lost(TOKENIZER, now)
        elif action == "tokenizer back":
            core.peer_joined(TOKENIZER, "tokenizer", now)
        elif action == "not encoded":
            core.encoding_failed(TOKENIZER, RequestFailed(RequestId(name), 400, "x", "y"), now)
        elif action == "throttle":
            core.throttle(Throttle(RequestId(name), 0, data.draw(st.booleans())))
        elif action == "encoded":
            encoded(core, name, now=now)
        elif action == "token":
            batch(core, rank, [(name, 0, [1], RUNNING)], started=[name], now=now)
        elif action == "end":
            batch(core, rank, [(name, i, [1], FINISH_LENGTH) for i in range(1)], now=now)
        elif action == "cancel":
            core.cancel(Cancel(RequestId(name)), now)
        elif action == "stop":
            core.cancel(Cancel(RequestId(name), data.draw(st.integers(0, 3)), "stop"), now)
        elif action == "lose":
            alive.discard(rank)
            core.peer_lost(worker(rank), now)
        elif action == "back" and rank not in alive:
            alive.add(rank)
            core.worker_ready(worker(rank), WorkerReady(rank, MODEL, 8))
        elif action == "fail":
            core.sequence_failed(worker(rank), SequenceFailed(RequestId(name), 0, 500, "x", "y"))
        else:
            core.tick(now)
        core.check_integrity()
    for name in names:
        core.cancel(Cancel(RequestId(name)), 99.0)
    core.check_integrity()
    assert len(core.rows()) == 0
    assert core.num_waiting == 0


@pytest.mark.parametrize("index", [0, ALL_CHOICES])
def test_cancelling_twice_is_harmless(index):
    core = serving_core()
    submit(core, "a")
    encoded(core, "a")
    assert core.cancel(Cancel(RequestId("a"), index), 3.0)
    assert core.cancel(Cancel(RequestId("a"), index), 4.0) == []
    assert np.all([len(core.rows()) == 0])


def test_what_each_peer_has_is_told_with_the_most_it_had():
    metrics = MetricSet()
    core = serving_core(metrics=metrics)

    def outstanding() -> dict[str, tuple[int, int]]:
        core.tick(4.0)
        return {q.name: (q.depth, q.high_water) for q in metrics.read_queues() if " at " in q.name}

    submit(core, "a", n=2)
    submit(core, "b")
    assert outstanding() == {"prompts at tokenizer/0": (2, 2)}
    encoded(core, "a")
    assert outstanding() == {"prompts at tokenizer/0": (1, 2), "choices at worker/0": (2, 2)}
    encoded(core, "b")
    batch(core, 0, [("a", 0, [9], FINISH_LENGTH)])
    assert outstanding() == {"prompts at tokenizer/0": (0, 2), "choices at worker/0": (2, 3)}
    core.peer_lost(worker(0), 5.0)
    assert outstanding()["choices at worker/0"] == (0, 3)


# ---- what nobody waits for, and what is too much ------------------------------------------------
