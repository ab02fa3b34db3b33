"""The router's rules: admission, placement, losses and their clean-up, against simulated peers."""

from __future__ import annotations

import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.router.core import Outgoing, RouterCore
from daemon.router.metrics import RouterMetrics
from daemon.router.placement import choose_rank, preferred
from daemon.router.settings import RouterSettings
from transport.child import ProcessSettings
from transport.framing import encode_header, read_tokens, token_frame
from transport.ids import ProcessName, RequestId
from transport.messages import (
    ALL_CHOICES,
    FINISH_LENGTH,
    RUNNING,
    Cancel,
    Encode,
    Encoded,
    Finished,
    ModelInfo,
    RequestFailed,
    SamplingParams,
    SequenceFailed,
    Serving,
    Start,
    Submit,
    TokenBatch,
    WorkerReady,
)
from transport.sockets import Received
from transport.telemetry import MetricSet

FRONTEND = ProcessName("frontend/0")
TOKENIZER = ProcessName("tokenizer/0")
MODEL = ModelInfo(vocab_size=100, max_model_len=64, eos_token_ids=(2,), pool_tokens=64)


def worker(rank: int) -> ProcessName:
    return ProcessName(f"worker/{rank}")


def make_core(metrics: MetricSet | None = None, **changes) -> RouterCore:
    process = ProcessSettings(ProcessName("router/0"), "router", "test", "/tmp", 1, "hash")
    values = dict(
        process=process, workers=2, tokenizers=1, max_waiting=4, routing="least-loaded",
        retry_after_seconds=3, max_migrations=2, stage_seconds=10.0,
    )  # fmt: skip
    chosen = RouterSettings(**{**values, **changes})
    return RouterCore(chosen, RouterMetrics(metrics or MetricSet(), chosen.max_waiting))


def serving_core(ranks: int = 1, **changes) -> RouterCore:
    core = make_core(**changes)
    core.peer_joined(FRONTEND, "frontend", 0.0)
    core.peer_joined(TOKENIZER, "tokenizer", 0.0)
    for rank in range(ranks):
        core.worker_ready(worker(rank), WorkerReady(rank, MODEL, 8), 0.0)
    return core


def submit(core: RouterCore, name: str, n: int = 1, max_tokens: int = 8, affinity: str = ""):
    message = Submit(
        RequestId(name), "text", SamplingParams(max_tokens=max_tokens), 0.0, n=n, affinity=affinity
    )
    return core.submit(FRONTEND, message, b"text", 1.0)


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
    assert core.num_requests == 0


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
    assert core.num_requests == 0


def test_the_output_is_limited_to_the_room_left():
    core = serving_core()
    submit(core, "a", max_tokens=1000)
    ((_, start, _),) = starts(encoded(core, "a"))
    assert start.sampling.max_tokens == 61


def test_token_prompts_skip_the_tokenizer_and_are_checked():
    core = serving_core()
    good = Submit(RequestId("a"), "tokens", SamplingParams(max_tokens=1), 0.0)
    assert starts(core.submit(FRONTEND, good, token_frame([1, 2]), 1.0))
    bad = Submit(RequestId("b"), "tokens", SamplingParams(max_tokens=1), 0.0)
    (failed,) = messages(core.submit(FRONTEND, bad, token_frame([1, 100]), 1.0), RequestFailed)
    assert (failed.status, failed.param) == (400, "prompt")


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
    out = core.worker_ready(worker(0), WorkerReady(0, MODEL, 8), 5.0)
    assert messages(out, Serving)
    assert len(starts(out)) == 1


def test_a_request_is_given_up_after_too_many_lost_workers():
    core = serving_core(ranks=1, max_migrations=1)
    submit(core, "a")
    encoded(core, "a")
    core.peer_lost(worker(0), 4.0)
    core.worker_ready(worker(0), WorkerReady(0, MODEL, 8), 5.0)
    (failed,) = messages(core.peer_lost(worker(0), 6.0), RequestFailed)
    assert failed.status == 500
    assert core.num_requests == 0


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
    assert core.num_requests == 0


def test_what_no_process_takes_fails_in_time():
    core = serving_core(stage_seconds=5.0)
    submit(core, "a")
    assert not messages(core.tick(5.9), RequestFailed)
    (failed,) = messages(core.tick(6.1), RequestFailed)
    assert failed.status == 503
    assert failed.retry_after == 3


def test_affinity_keeps_a_conversation_on_one_rank_until_that_is_overloaded():
    loads = dict.fromkeys(range(8), 0)
    home, passed = choose_rank("affinity", "talk", loads)
    assert not passed
    assert choose_rank("affinity", "talk", {**loads, (home + 1) % 8: 9}) == (home, False)
    rank, passed = choose_rank("affinity", "talk", {**loads, home: 20})
    assert passed
    assert rank != home
    without_another = {r: 0 for r in loads if r != (home + 1) % 8}
    assert preferred("talk", without_another) == home


def test_one_of_two_ranks_can_be_overloaded_and_a_single_one_cannot():
    home, _ = choose_rank("affinity", "talk", {0: 0, 1: 0})
    other = 1 - home
    assert choose_rank("affinity", "talk", {home: 10, other: 3}) == (home, False)
    assert choose_rank("affinity", "talk", {home: 11, other: 3}) == (other, True)
    assert choose_rank("affinity", "talk", {0: 1000}) == (0, False)


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
            ["submit", "encoded", "token", "end", "cancel", "stop", "lose", "back", "fail", "tick"]
        ))  # fmt: skip
        if action == "submit":
            submit(core, name, n=data.draw(st.integers(1, 3)))
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
            core.worker_ready(worker(rank), WorkerReady(rank, MODEL, 8), now)
        elif action == "fail":
            core.sequence_failed(SequenceFailed(RequestId(name), 0, 500, "x", "y"))
        else:
            core.tick(now)
        core.check_integrity()
    for name in names:
        core.cancel(Cancel(RequestId(name)), 99.0)
    core.check_integrity()
    assert core.num_requests == 0
    assert core.num_waiting == 0


@pytest.mark.parametrize("index", [0, ALL_CHOICES])
def test_cancelling_twice_is_harmless(index):
    core = serving_core()
    submit(core, "a")
    encoded(core, "a")
    assert core.cancel(Cancel(RequestId("a"), index), 3.0)
    assert core.cancel(Cancel(RequestId("a"), index), 4.0) == []
    assert np.all([core.num_requests == 0])


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
