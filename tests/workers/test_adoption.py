"""Sequences whose prompt was computed elsewhere: room is reserved, their KV arrives, they decode at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
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
from workers.scheduling.sequence import Sequence, Status

VOCAB = 23
PAGE = 8
WINDOW = 5


def make_engine(num_pages: int = 20, max_num_seqs: int = 4, depth: int = 0) -> FakeEngine:
    return FakeEngine(
        FakeEngineSettings(VOCAB, num_pages, max_num_seqs, num_pages * PAGE, page_tokens=PAGE,
                           pipeline_depth=depth, window=WINDOW, keep_tokens=11)
    )  # fmt: skip


def sequence(number: int, prompt: list[int], output: int, **sampling) -> Sequence:
    priority = sampling.pop("priority", 0)
    return Sequence(
        key=(RequestId(f"r{number}"), 0), frontend=ProcessName("frontend/0"),
        prompt=np.asarray(prompt, np.int32), prompt_len=len(prompt),
        generate=Generate(SamplingParams(max_tokens=output, **sampling), priority=priority),
        seed=0, arrival=float(number),
    )  # fmt: skip


def simulate(prompt: list[int], output: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(output):
        tokens.append(fake_next_token(np.asarray(tokens, np.int32), VOCAB, WINDOW))
    return tokens[len(prompt) :]


def receive(engine: FakeEngine, arriving: Sequence) -> int:
    """What a transport does: write KV and state into what was reserved. Returns the first token."""
    assert arriving.slot is not None
    engine.receive(arriving.slot, arriving.pages, arriving.prompt)
    return fake_next_token(arriving.prompt, VOCAB, WINDOW)


@dataclass
class Wanted:
    prompt: list[int]
    output: int
    at: int
    priority: int
    travels: int | None
    """Turns from the reservation to the arrival of its KV; None: it is computed here."""
    cancel_after: int | None


WANTED = st.builds(
    Wanted,
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40), st.integers(1, 20),
    st.integers(0, 30), st.integers(0, 2), st.none() | st.integers(0, 9),
    st.none() | st.integers(0, 25),
)  # fmt: skip


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(WANTED, min_size=1, max_size=10),
    st.integers(9, 24),
    st.integers(1, 5),
    st.integers(3, 40),
    st.integers(0, 1),
)
def test_adopted_sequences_get_exactly_their_tokens(traffic, num_pages, slots, budget, depth):
    engine = make_engine(num_pages, slots, depth)
    scheduler = Scheduler(engine.info, budget, 2)
    sequences = [
        sequence(n, w.prompt, w.output, priority=w.priority) for n, w in enumerate(traffic)
    ]
    got: list[list[int]] = [[] for _ in traffic]
    asked = {n for n, wanted in enumerate(traffic) if wanted.travels is not None}
    arriving: dict[int, int] = {}
    cancelled: set[int] = set()
    for turn in range(3000):
        for number, wanted in enumerate(traffic):
            mine = sequences[number]
            if wanted.cancel_after is not None and wanted.at + wanted.cancel_after == turn:
                asked.discard(number)
                arriving.pop(number, None)
                if scheduler.cancel(mine.key[0]) or not mine.generated:
                    cancelled.add(number)
            if wanted.travels is None and wanted.at == turn and number not in cancelled:
                scheduler.add(mine)
            if wanted.travels is not None and number in asked and wanted.at <= turn:
                if scheduler.reserve(mine):
                    asked.remove(number)
                    arriving[number] = turn + wanted.travels
                else:
                    assert mine.slot is None and not mine.pages
            if arriving.get(number) == turn:
                del arriving[number]
                row = scheduler.adopt(mine, receive(engine, mine))
                got[number].append(row.token)
                assert (row.finish == RUNNING) == (wanted.output > 1)
            scheduler.check_integrity()
        step = scheduler.next_step()
        scheduler.check_integrity()
        if step is not None:
            step.launched = engine.launch(step.plan)
        if scheduler.num_in_flight > (depth if step is not None else 0):
            for row in scheduler.collect().rows:
                got[sequences.index(row.sequence)].append(row.token)
        elif step is None and turn > 60 and not asked and not arriving:
            break
    else:
        raise AssertionError("the scheduler never came to rest")
    assert scheduler.blocks.pages_used == scheduler.blocks.slots_used == 0
    for number, wanted in enumerate(traffic):
        tokens = simulate(wanted.prompt, wanted.output)
        assert got[number] == (tokens[: len(got[number])] if number in cancelled else tokens)


def decode_once(engine: FakeEngine, scheduler: Scheduler) -> list[int]:
    step = scheduler.next_step()
    assert step is not None and step.plan.decodes and not step.plan.prompts
    step.launched = engine.launch(step.plan)
    return [row.token for row in scheduler.collect().rows]


def test_an_adopted_sequence_decodes_in_the_next_step_and_is_not_started_again():
    engine = make_engine()
    scheduler = Scheduler(engine.info, 64, 1)
    prompt = list(range(20))
    mine = sequence(0, prompt, 5)
    assert scheduler.reserve(mine)
    assert scheduler.next_step() is None, "nothing to compute before it arrives"
    row = scheduler.adopt(mine, receive(engine, mine))
    assert [row.token, *(decode_once(engine, scheduler)[0] for _ in range(4))] == simulate(
        prompt, 5
    )
    assert mine.status is Status.FINISHED
    assert scheduler.counts.prompt_steps == 0


def test_an_adopted_sequence_that_is_computed_again_is_not_reported_as_started():
    """The client was told of its start, and of what was cached, where its prompt was computed."""
    engine = make_engine(max_num_seqs=1)
    scheduler = Scheduler(engine.info, 64, 1)
    mine = sequence(0, list(range(20)), 5)
    assert scheduler.reserve(mine)
    got = [scheduler.adopt(mine, receive(engine, mine)).token, *decode_once(engine, scheduler)]
    scheduler.add(sequence(1, [3], 2, priority=-1))
    started = []
    while (step := scheduler.next_step()) is not None:
        started += step.started
        step.launched = engine.launch(step.plan)
        got += [row.token for row in scheduler.collect().rows if row.sequence is mine]
    assert scheduler.counts.preemptions == 1
    assert [other.key[0] for other in started] == ["r1"]
    assert got == simulate(list(range(20)), 5)


@pytest.mark.parametrize(
    ("sampling", "finish"),
    [({"output": 1}, FINISH_LENGTH), ({"output": 5, "stop_token_ids": (9,)}, FINISH_STOP)],
)
def test_a_first_token_that_ends_it_frees_everything(sampling, finish):
    engine = make_engine()
    scheduler = Scheduler(engine.info, 64, 1)
    mine = sequence(0, list(range(20)), sampling.pop("output"), **sampling)
    assert scheduler.reserve(mine)
    receive(engine, mine)
    assert scheduler.adopt(mine, 9).finish == finish
    assert scheduler.next_step() is None
    assert scheduler.blocks.pages_used == scheduler.blocks.slots_used == 0
    scheduler.check_integrity()


END: dict[str, Callable[[Scheduler], object]] = {
    "cancel": lambda scheduler: scheduler.cancel(RequestId("r0")),
    "cancel all": lambda scheduler: scheduler.cancel_all(),
}


@pytest.mark.parametrize("how", END)
def test_a_reservation_that_is_given_up_frees_everything(how):
    engine = make_engine()
    scheduler = Scheduler(engine.info, 64, 1)
    mine = sequence(0, list(range(20)), 5)
    assert scheduler.reserve(mine)
    END[how](scheduler)
    assert scheduler.blocks.pages_used == scheduler.blocks.slots_used == 0
    scheduler.check_integrity()
    with pytest.raises(ValueError, match="not reserved"):
        scheduler.adopt(mine, 3)
    scheduler.add(sequence(0, [1], 1))


def test_a_reservation_displaces_nobody_and_is_displaced_by_nobody():
    engine = make_engine(num_pages=6, max_num_seqs=3)
    scheduler = Scheduler(engine.info, 64, 1)
    running = sequence(5, [1] * 17, 12)
    scheduler.add(running)
    step = scheduler.next_step()
    assert step is not None
    step.launched = engine.launch(step.plan)
    scheduler.collect()
    assert not scheduler.reserve(sequence(0, [2] * 24, 1)), "one page is left to what decodes"
    reserved = sequence(9, [2] * 16, 5, priority=2)
    assert scheduler.reserve(reserved)
    pages = list(reserved.pages)
    better = sequence(1, [3] * 20, 2)
    scheduler.add(better)
    for _ in range(30):
        step = scheduler.next_step()
        if step is not None:
            step.launched = engine.launch(step.plan)
            scheduler.collect()
        scheduler.check_integrity()
    assert reserved.pages == pages
    assert better.status is Status.FINISHED


def test_a_prompt_that_can_never_fit_is_not_reserved_for():
    scheduler = Scheduler(make_engine(num_pages=4).info, 64, 1)
    with pytest.raises(ValueError, match="33 tokens"):
        scheduler.reserve(sequence(0, [1] * 30, 3))
