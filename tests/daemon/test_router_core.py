"""The router's rules: admission, placement, losses and their clean-up, against simulated peers."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.router.core import RouterCore
from daemon.router.metrics import RouterMetrics
from daemon.router.outbox import Outgoing
from daemon.router.placement import choose, preferred
from daemon.router.settings import RouterSettings
from transport.child import ProcessSettings
from transport.framing import encode_header, read_tokens, token_frame
from transport.ids import ProcessName, RequestId
from transport.messages.generate import (
    ALL_CHOICES,
    FINISH_LENGTH,
    RUNNING,
    Cancel,
    Encode,
    Encoded,
    Generate,
    ModelInfo,
    RequestFailed,
    SamplingParams,
    Throttle,
    TokenBatch,
)
from transport.messages.to_frontend import Finished, Serving
from transport.messages.to_router import SequenceFailed, Submit, WorkerReady
from transport.messages.to_worker import Start
from transport.sockets import Received
from transport.telemetry.metrics import MetricSet

FRONTEND = ProcessName("frontend/0")
TOKENIZER = ProcessName("tokenizer/0")
LONG = bytes(12 << 20)
"""Three such prompts are more than a tokenizer is given at a time."""
TOO_LONG = bytes(3 * len(LONG))
MODEL = ModelInfo(vocab_size=100, max_model_len=64, eos_token_ids=(2,), pool_tokens=64)


def worker(rank: int) -> ProcessName:
    return ProcessName(f"worker/{rank}")


def make_core(metrics: MetricSet | None = None, **changes) -> RouterCore:
    process = ProcessSettings(ProcessName("router/0"), "router", "test", "/tmp", 1, "hash")
    values = dict(
        process=process, workers=1, tokenizers=1, max_waiting=4, max_waiting_choices=12,
        max_waiting_bytes=100 << 20, routing="least-loaded",
        retry_after_seconds=3, max_migrations=2, stage_seconds=10.0, start_seconds=100.0,
    )  # fmt: skip
    chosen = RouterSettings(**{**values, **changes})
    return RouterCore(chosen, RouterMetrics(metrics or MetricSet(), chosen))


def serving_core(ranks: int = 1, **changes) -> RouterCore:
    core = make_core(workers=ranks, **changes)
    core.peer_joined(FRONTEND, "frontend", 0.0)
    core.peer_joined(TOKENIZER, "tokenizer", 0.0)
    for rank in range(ranks):
        core.worker_ready(worker(rank), WorkerReady(rank, MODEL, 8))
    return core


def generating(max_tokens: int) -> Generate:
    return Generate(SamplingParams(max_tokens=max_tokens))


def submit(
    core: RouterCore, name: str, n: int = 1, max_tokens: int = 8, call: str = "", text=b"text",
    call_choices: int = 0, now: float = 1.0,
):  # fmt: skip
    message = Submit(
        RequestId(name), "text", generating(max_tokens), 0.0, n=n, call=call,
        call_choices=call_choices,
    )  # fmt: skip
    return core.submit(FRONTEND, message, text, now)


def encoded(core: RouterCore, name: str, ids=(5, 6, 7), now: float = 2.0):
    return core.encoded(TOKENIZER, Encoded(RequestId(name)), token_frame(list(ids)), now)


def batch(core: RouterCore, rank: int, rows, started=(), now: float = 3.0):
    """rows: (request, index, tokens, finish)"""
    header = TokenBatch(
        frontend=FRONTEND,
        step=1,
        request_ids=[RequestId(row[0]) for row in rows],
        indexes=[row[1] for row in rows],
        counts=[len(row[2]) for row in rows],
        finish=[row[3] for row in rows],
        started=[(RequestId(name), 0, 0, 3) for name in started],
    )
    ids = [token for row in rows for token in row[2]]
    frames = [zmq.Frame(bytes(token_frame(ids)))]
    received = Received(header, zmq.Frame(encode_header(header)), frames, worker(rank))
    return core.tokens(worker(rank), header, received, now)


def messages(outgoing: list[Outgoing], kind: type) -> list:
    return [item.message for item in outgoing if isinstance(item.message, kind)]


def starts(outgoing: list[Outgoing]) -> list[tuple[ProcessName, Start, list[int]]]:
    return [
        (item.peer, item.message, read_tokens(item.frames[0]).tolist())
        for item in outgoing
        if isinstance(item.message, Start)
    ]


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
    assert moved[0][1].prompt_len == 3
    assert batch(core, lost, [("a", 0, [1], RUNNING)]) == [], "the dead may not speak"
    assert messages(batch(core, 1 - lost, [("a", 0, [1], FINISH_LENGTH)]), Finished)
    core.check_integrity()


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
    assert messages(submit(core, "d"), Encode)
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
