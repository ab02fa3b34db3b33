"""A scheduler and an engine, run until every prompt is answered."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from transport.ids import ProcessName, RequestId
from transport.messages.generate import RUNNING, Generate, SamplingParams
from workers.contract import Engine
from workers.scheduling.scheduler import Scheduler
from workers.scheduling.sequence import Sequence

LEAST_GAP = 3e-4
"""Between the two best logprobs of a greedy step: a closer choice may fall either way."""


@dataclass
class Answers:
    tokens: list[list[int]]
    logprobs: list[list[float]]
    """Of the chosen tokens; empty lists where none were asked for."""
    preemptions: int


def run_scheduled(
    engine: Engine,
    prompts: list[list[int]],
    *,
    chunk: int,
    sampling: SamplingParams,
    seeds: list[int] | None = None,
    stagger: int = 0,
) -> Answers:
    """`chunk`: prompt tokens a step. `stagger`: turns between the arrivals of two prompts; 0: all come at
    once. Greedy runs with two logprobs or more are checked to have no near tie."""
    scheduler = Scheduler(engine.info, chunk, prefill_any_interval=1)
    sequences = [
        Sequence(
            key=(RequestId(f"r{i:02}"), 0), frontend=ProcessName("frontend/0"),
            prompt=np.asarray(ids, np.int32), prompt_len=len(ids), generate=Generate(sampling),
            seed=i if seeds is None else seeds[i], arrival=float(i),
        )
        for i, ids in enumerate(prompts)
    ]  # fmt: skip
    logprobs: dict[object, list[float]] = {sequence.key: [] for sequence in sequences}
    unfinished = len(sequences)
    for turn in itertools.count():
        arriving = sequences if not stagger else sequences[turn // stagger :][:1]
        if turn == 0 or (stagger and turn % stagger == 0):
            for sequence in arriving:
                scheduler.add(sequence)
        step = scheduler.next_step()
        if step is None:
            assert stagger and turn < stagger * len(sequences), "nothing to do, but not finished"
            continue
        step.launched = engine.launch(step.plan)
        for row in scheduler.collect().rows:
            unfinished -= row.finish != RUNNING
            if row.logprobs is not None:
                logprobs[row.sequence.key].append(row.logprobs.chosen)
                if sampling.temperature == 0 and sampling.logprobs >= 2:
                    best, second = row.logprobs.top_logprobs[:2]
                    assert best - second > LEAST_GAP, "take other prompts"
        scheduler.check_integrity()
        if not unfinished:
            break
    assert scheduler.blocks.pages_used == scheduler.blocks.slots_used == 0
    return Answers(
        [sequence.generated for sequence in sequences],
        [logprobs[sequence.key] for sequence in sequences],
        scheduler.counts.preemptions,
    )
