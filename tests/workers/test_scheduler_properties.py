"""Random traffic through the scheduler and the checking fake engine.

The fake's tokens depend on every earlier token as read back through the block tables, so equality
with a straight simulation shows that pages, slots and positions are right, whatever was preempted,
chunked, paused or cancelled meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.ids import ProcessName, RequestId
from transport.messages.generate import (
    FINISH_LENGTH,
    FINISH_STOP,
    RUNNING,
    Generate,
    SamplingParams,
)
from workers.engine.fake import FakeEngine, FakeEngineSettings, fake_next_token
from workers.scheduling.scheduler import Scheduler
from workers.scheduling.sequence import Sequence

VOCAB = 23
EOS = 7
PAGE = 8


@dataclass
class Wanted:
    prompt: list[int]
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    priority: int
    arrives_at: int
    cancel_at: int | None
    pause_at: int | None


def make_sequence(number: int, wanted: Wanted) -> Sequence:
    return Sequence(
        key=(RequestId(f"r{number}"), 0),
        frontend=ProcessName("frontend/0"),
        prompt=np.asarray(wanted.prompt, dtype=np.int32),
        prompt_len=len(wanted.prompt),
        generate=Generate(
            SamplingParams(
                wanted.max_tokens, ignore_eos=wanted.ignore_eos, min_tokens=wanted.min_tokens
            ),
            priority=wanted.priority,
        ),
        seed=0,
        arrival=float(number),
    )


def simulate(wanted: Wanted) -> tuple[list[int], int]:
    tokens = list(wanted.prompt)
    while True:
        token = fake_next_token(np.asarray(tokens, dtype=np.int32), VOCAB)
        tokens.append(token)
        count = len(tokens) - len(wanted.prompt)
        if token == EOS and not wanted.ignore_eos and count > wanted.min_tokens:
            return tokens[len(wanted.prompt) :], FINISH_STOP
        if count >= wanted.max_tokens:
            return tokens[len(wanted.prompt) :], FINISH_LENGTH


wanted_strategy = st.builds(
    Wanted,
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=60),
    max_tokens=st.integers(1, 40),
    min_tokens=st.integers(0, 3),
    ignore_eos=st.booleans(),
    priority=st.integers(0, 2),
    arrives_at=st.integers(0, 30),
    cancel_at=st.none() | st.integers(0, 60),
    pause_at=st.none() | st.integers(0, 40),
)


@settings(max_examples=150, deadline=None)
@given(
    traffic=st.lists(wanted_strategy, min_size=1, max_size=10),
    num_pages=st.integers(13, 30),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(1, 64),
    interval=st.integers(1, 4),
    depth=st.integers(0, 1),
)
def test_every_sequence_gets_exactly_its_tokens(
    traffic, num_pages, max_num_seqs, budget, interval, depth
):
    engine = FakeEngine(
        FakeEngineSettings(
            vocab_size=VOCAB,
            num_pages=num_pages,
            max_num_seqs=max_num_seqs,
            max_model_len=100,
            eos_token_ids=(EOS,),
            page_tokens=PAGE,
            pipeline_depth=depth,
        )
    )
    scheduler = Scheduler(engine.info, budget, interval)
    got: dict[RequestId, list[int]] = {}
    finish: dict[RequestId, int] = {}
    started: list[RequestId] = []
    cancelled: set[RequestId] = set()
    for turn in range(5000):
        for number, wanted in enumerate(traffic):
            key = RequestId(f"r{number}")
            if wanted.arrives_at == turn:
                scheduler.add(make_sequence(number, wanted))
            if wanted.cancel_at == turn and wanted.arrives_at <= turn and scheduler.cancel(key):
                cancelled.add(key)
            if wanted.pause_at == turn:
                scheduler.throttle(key, 0, paused=True)
            if wanted.pause_at is not None and turn == wanted.pause_at + 10:
                scheduler.throttle(key, 0, paused=False)
            scheduler.check_integrity()
        step = scheduler.next_step()
        scheduler.check_integrity()
        if step is not None:
            plan = step.plan
            assert bool(plan.prompts) != bool(plan.decodes)
            assert sum(len(chunk.tokens) for chunk in plan.prompts) <= budget
            step.launched = engine.launch(plan)
        if scheduler.num_in_flight > (depth if step is not None else 0):
            output = scheduler.collect()
            scheduler.check_integrity()
            started += [sequence.key[0] for sequence in output.step.started]
            for row in output.rows:
                key = row.sequence.key[0]
                assert key not in finish, "a token after the end"
                got.setdefault(key, []).append(row.token)
                if row.finish != RUNNING:
                    finish[key] = row.finish
        elif turn > 100 and not scheduler.num_waiting and not scheduler.num_running:
            break
    else:
        raise AssertionError("the scheduler never came to rest")
    assert scheduler.blocks.pages_used == 0
    assert scheduler.blocks.slots_used == 0
    assert len(started) == len(set(started))
    for number, wanted in enumerate(traffic):
        key = RequestId(f"r{number}")
        tokens, code = simulate(wanted)
        if key in cancelled:
            assert got.get(key, []) == tokens[: len(got.get(key, []))]
            assert key not in finish
        else:
            assert got[key] == tokens
            assert finish[key] == code


def engine_info(**changes):
    base = FakeEngineSettings(
        vocab_size=VOCAB, num_pages=4, max_num_seqs=2, max_model_len=32, page_tokens=PAGE
    )
    return FakeEngine(replace(base, **changes)).info


def test_a_sequence_that_can_never_fit_is_refused():
    scheduler = Scheduler(engine_info(), 64, 1)
    wanted = Wanted([1] * 30, 3, 0, True, 0, 0, None, None)
    try:
        scheduler.add(make_sequence(0, wanted))
    except ValueError as error:
        assert "33 tokens" in str(error)
        assert "32" in str(error)
    else:
        raise AssertionError("accepted")


def test_prompts_wait_for_the_interval_only_while_something_decodes():
    info = engine_info(num_pages=20, max_num_seqs=4)
    engine = FakeEngine(FakeEngineSettings(VOCAB, 20, 4, 100, page_tokens=PAGE))
    scheduler = Scheduler(info, 64, 5)
    kinds = ""
    for turn in range(14):
        if turn in (0, 1, 2):
            wanted = Wanted([turn + 1], 30, 0, True, 0, 0, None, None)
            scheduler.add(make_sequence(turn, wanted))
        step = scheduler.next_step()
        assert step is not None
        kinds += "P" if step.plan.prompts else "d"
        step.launched = engine.launch(step.plan)
        scheduler.collect()
    assert kinds == "PdddddPddddddd"


def ending_order(scheduler: Scheduler, engine: FakeEngine, late: Sequence) -> list[RequestId]:
    """Run until nothing is left; `late` comes when three steps are over."""
    order = []
    for turn in range(200):
        if turn == 3:
            scheduler.add(late)
        step = scheduler.next_step()
        if step is None:
            break
        step.launched = engine.launch(step.plan)
        for row in scheduler.collect().rows:
            if row.finish != RUNNING:
                order.append(row.sequence.key[0])
    return order


def test_better_priority_displaces_the_last_in_rank_when_slots_run_out():
    engine = FakeEngine(FakeEngineSettings(VOCAB, 20, 1, 100, page_tokens=PAGE))
    scheduler = Scheduler(engine.info, 64, 1)
    scheduler.add(make_sequence(0, Wanted([1, 2], 20, 0, True, 5, 0, None, None)))
    late = make_sequence(1, Wanted([3], 2, 0, True, 0, 0, None, None))
    order = ending_order(scheduler, engine, late)
    assert order == ["r1", "r0"]
    assert scheduler.counts.preemptions == 1


def test_nobody_is_displaced_for_a_prompt_that_does_not_fit():
    engine = FakeEngine(FakeEngineSettings(VOCAB, 12, 2, 96, page_tokens=PAGE))
    scheduler = Scheduler(engine.info, 96, 1)
    first = Wanted([1] * 64, 6, 0, True, 0, 0, None, None)
    scheduler.add(make_sequence(0, first))
    scheduler.add(make_sequence(1, Wanted([2] * 8, 6, 0, True, 5, 0, None, None)))
    for turn in range(200):
        if turn == 3:  # it ranks before the second, and the first one's pages are not to be had
            scheduler.add(make_sequence(2, Wanted([3] * 40, 2, 0, True, 3, 0, None, None)))
        step = scheduler.next_step()
        scheduler.check_integrity()
        if step is None:
            break
        step.launched = engine.launch(step.plan)
        scheduler.collect()
    assert scheduler.counts.preemptions == 0


def test_prompts_that_are_half_computed_do_not_keep_a_better_one_from_starting():
    """It ranks before them, so what they still need is not kept for them: else nobody got on."""
    engine = FakeEngine(FakeEngineSettings(VOCAB, 13, 4, 13 * PAGE, page_tokens=PAGE))
    scheduler = Scheduler(engine.info, 4, 1)
    arrivals = {0: Wanted([0] * 49, 1, 0, True, 2, 0, None, None),
                1: Wanted([0] * 41, 1, 0, True, 1, 0, None, None),
                2: Wanted([0] * 17, 1, 0, True, 0, 0, None, None)}  # fmt: skip
    finished = []
    for turn in range(60):
        if turn in arrivals:
            scheduler.add(make_sequence(turn, arrivals[turn]))
        step = scheduler.next_step()
        if step is not None:
            step.launched = engine.launch(step.plan)
            finished += [row.sequence.key[0] for row in scheduler.collect().rows]
    assert finished == ["r2", "r1", "r0"]


def test_of_those_that_may_give_way_the_last_in_rank_does():
    engine = FakeEngine(FakeEngineSettings(VOCAB, 20, 2, 100, page_tokens=PAGE))
    scheduler = Scheduler(engine.info, 64, 1)
    for number, priority in enumerate((3, 5)):
        scheduler.add(make_sequence(number, Wanted([number], 20, 0, True, priority, 0, None, None)))
    late = make_sequence(2, Wanted([3], 2, 0, True, 0, 0, None, None))
    order = ending_order(scheduler, engine, late)
    assert order == ["r2", "r0", "r1"]
    assert scheduler.counts.preemptions == 1
