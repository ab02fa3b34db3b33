"""A scheduler and an engine, run until every prompt is answered, as the worker's loop does it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hicache.manager.null import NO_PREFIX_CACHE, PrefixManager
from transport.ids import ProcessName, RequestId
from transport.messages.generate import RUNNING, Generate, SamplingParams
from workers.contract import Engine
from workers.scheduling.scheduler import Scheduler
from workers.scheduling.sequence import Sequence
from workers.scheduling.step import TokenRow

LEAST_GAP = 3e-4
"""Between the two best logprobs of a greedy step: a closer choice may fall either way."""
MOST_TURNS = 20_000


@dataclass
class Answers:
    tokens: list[list[int]]
    logprobs: list[list[float]]
    """Of the chosen tokens; empty lists where none were asked for."""
    preemptions: int
    recomputed: int
    """Generated tokens that prompt steps computed anew, summed up."""
    cached: list[int]
    """Tokens of each prompt that its latest start took from the prefix cache."""


class ScheduledRun:
    """One scheduler over an engine, which the caller owns. `prefixes` is the caller's, too."""

    def __init__(
        self,
        engine: Engine,
        chunk: int,
        *,
        max_num_seqs: int | None = None,
        num_pages: int | None = None,
        prefixes: PrefixManager = NO_PREFIX_CACHE,
    ) -> None:
        """`chunk`: prompt tokens a step. `max_num_seqs`, `num_pages`: use fewer than the engine has."""
        info = engine.info
        info = replace(
            info,
            max_num_seqs=max_num_seqs or info.max_num_seqs,
            num_pages=num_pages or info.num_pages,
        )
        assert info.num_pages <= engine.info.num_pages
        assert info.max_num_seqs <= engine.info.max_num_seqs
        self.engine, self.prefixes = engine, prefixes
        self.scheduler = Scheduler(info, chunk, 1, prefixes.reuse)
        self.recomputed = 0

    def turn(self) -> list[TokenRow]:
        """Launch what can be launched and collect what must be collected."""
        step = self.scheduler.next_step()
        transfers = self.prefixes.transfers
        if step is not None:
            for chunk in step.plan.prompts:
                known = chunk.start + len(chunk.tokens)
                self.recomputed += max(0, known - max(chunk.prompt_len, chunk.start))
            transfers.load(step.plan.loads, step.plan.written_pages)
            step.launched = self.engine.launch(step.plan)
            transfers.store(step.plan.stores)
        depth = self.engine.info.pipeline_depth if step is not None else 0
        rows = self.scheduler.collect().rows if self.scheduler.num_in_flight > depth else []
        self.prefixes.tick()
        self.scheduler.check_integrity()
        self.prefixes.check_integrity()
        return rows

    def rest(self) -> None:
        """Let copies end that are under way; nothing is held afterwards."""
        for _ in range(MOST_TURNS):
            if not self.prefixes.transfers.num_open:
                break
            self.prefixes.tick()
        assert not self.prefixes.transfers.num_open
        assert self.scheduler.blocks.pages_used == self.scheduler.blocks.slots_used == 0


def run_scheduled(
    engine: Engine,
    prompts: list[list[int]],
    *,
    chunk: int,
    sampling: SamplingParams,
    seeds: list[int] | None = None,
    stagger: int = 0,
    max_num_seqs: int | None = None,
    num_pages: int | None = None,
    prefixes: PrefixManager = NO_PREFIX_CACHE,
) -> Answers:
    """`stagger`: turns between the arrivals of two prompts; 0: all come at once. Greedy runs with two
    logprobs or more are checked to have no near tie. The rest is as for `ScheduledRun`."""
    run = ScheduledRun(
        engine, chunk, max_num_seqs=max_num_seqs, num_pages=num_pages, prefixes=prefixes
    )
    sequences = [
        Sequence(
            key=(RequestId(f"r{i:02}"), 0), frontend=ProcessName("frontend/0"),
            prompt=np.asarray(ids, np.int32), prompt_len=len(ids), generate=Generate(sampling),
            seed=i if seeds is None else seeds[i], arrival=float(i),
        )
        for i, ids in enumerate(prompts)
    ]  # fmt: skip
    logprobs: dict[object, list[float]] = {sequence.key: [] for sequence in sequences}
    unfinished, arrived = len(sequences), 0
    for turn in range(MOST_TURNS):
        while arrived < len(sequences) and turn >= arrived * stagger:
            run.scheduler.add(sequences[arrived])
            arrived += 1
        for row in run.turn():
            unfinished -= row.finish != RUNNING
            if row.logprobs is not None:
                logprobs[row.sequence.key].append(row.logprobs.chosen)
                if sampling.temperature == 0 and sampling.logprobs >= 2:
                    best, second = row.logprobs.top_logprobs[:2]
                    assert best - second > LEAST_GAP, "take other prompts"
        if not unfinished:
            break
    assert not unfinished, "nothing to do, but not finished"
    run.rest()
    return Answers(
        [sequence.generated for sequence in sequences],
        [logprobs[sequence.key] for sequence in sequences],
        run.scheduler.counts.preemptions,
        run.recomputed,
        [sequence.prefix.cached_tokens for sequence in sequences],
    )
