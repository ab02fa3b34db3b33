"""Scheduler, prefix cache and engine over compact records, as the published checkpoint is served: what is
loaded from the cache gives the numbers of what is computed.

Rounding turns float noise into steps (see `test_golden.py`), so that no tolerance would tell a slip from
noise. The engine is therefore batch-invariant here, and nothing may differ by a bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.rank import open_late_prefix_cache
from tests.support.scheduled import Answers, ScheduledRun, run_scheduled
from transport.ids import ProcessName, RequestId
from transport.messages.generate import RUNNING, Generate, SamplingParams
from workers.engine.engine import ModelEngine
from workers.scheduling.sequence import Sequence

NEW_TOKENS = 8
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)
KEEP = 24


@pytest.fixture(scope="module")
def engine(make_driver) -> ModelEngine:
    made: ModelEngine = make_driver(
        "v41_tiny_quant", kv_dtype="auto", keep_tokens=KEEP, stores_prefixes=True,
        deterministic=True,
    ).engine  # fmt: skip
    assert {part.dtype for part in made.info.layout.page_tensors} == {"uint8"}
    return made


@pytest.fixture(scope="module")
def prompts(golden) -> list[list[int]]:
    """Two ends of one beginning, and two that cross a page border while they are answered."""
    values = golden("v41_tiny_quant", "golden")
    longest, other = (values[f"p{n}.input_ids"].tolist() for n in (300, 130))
    return [longest, longest[:256] + other[:40], other[:124], other[::-1][:125]]


@pytest.fixture(scope="module")
def uncached(engine, prompts) -> Answers:
    return run_scheduled(engine, prompts, chunk=512, sampling=GREEDY)


def check_same(answers: Answers, uncached: Answers) -> None:
    assert answers.tokens == uncached.tokens
    assert answers.logprobs == uncached.logprobs


def test_a_hit_gives_the_bits_of_an_uncached_run(engine, prompts, uncached):
    assert len(set(map(tuple, uncached.tokens))) == len(prompts)
    with open_late_prefix_cache(engine, host_pages=8, host_states=4) as cache:
        first = run_scheduled(engine, prompts, chunk=90, sampling=GREEDY, prefixes=cache)
        again = run_scheduled(engine, prompts, chunk=512, sampling=GREEDY, prefixes=cache)
    assert first.cached == [0, 256, 0, 0]
    assert again.cached == [256, 256, 0, 0]
    check_same(first, uncached)
    check_same(again, uncached)


def test_what_is_preempted_goes_on_from_a_hit_with_the_same_bits(engine, prompts, uncached):
    with open_late_prefix_cache(engine, host_pages=2, host_states=2) as cache:
        answers = run_scheduled(
            engine, prompts[::-1], chunk=64, sampling=GREEDY, prefixes=cache, num_pages=3
        )
    assert answers.preemptions > 0 and answers.recomputed > 0
    assert answers.cached[-1] == 256
    assert answers.tokens == uncached.tokens[::-1]
    assert answers.logprobs == uncached.logprobs[::-1]


def sequence(name: str, prompt: list[int], priority: int = 0) -> Sequence:
    return Sequence(
        key=(RequestId(name), 0), frontend=ProcessName("frontend/0"),
        prompt=np.asarray(prompt, np.int32), prompt_len=len(prompt),
        generate=Generate(GREEDY, priority=priority), seed=0,
    )  # fmt: skip


class Rows:
    """Runs sequences and keeps what they are answered."""

    def __init__(self, run: ScheduledRun) -> None:
        self.run = run
        self.logprobs: dict[str, list[float]] = {}

    def take(self, row) -> bool:
        """Whether it is the last one of its sequence."""
        self.logprobs.setdefault(row.sequence.key[0], []).append(row.logprobs.chosen)
        return row.finish != RUNNING

    def until(self, name: str, count: int) -> None:
        for _ in range(1000):
            if len(self.logprobs.get(name, [])) >= count:
                return
            for row in self.run.turn():
                self.take(row)
        raise AssertionError(f"{name} does not get on")


def test_what_is_adopted_goes_on_with_the_same_bits(engine, prompts, uncached):
    """A prompt is computed from a hit, its KV travels to reserved pages and another slot, and the adopted
    sequence is answered, preempted and answered again."""
    model = engine.model
    with open_late_prefix_cache(engine, host_pages=8, host_states=4) as cache:
        rows = Rows(ScheduledRun(engine, 64, num_pages=7, prefixes=cache))
        scheduler = rows.run.scheduler
        scheduler.add(sequence("first", prompts[1]))
        rows.until("first", NEW_TOKENS)
        sent, adopted = sequence("sent", prompts[0]), sequence("adopted", prompts[0], priority=1)
        scheduler.add(sent)
        rows.until("sent", 1)
        assert sent.prefix.cached_tokens == 256
        assert scheduler.reserve(adopted)
        with torch.inference_mode():
            model.pages[adopted.pages] = model.pages[sent.pages[: len(adopted.pages)]]
            model.caches.states[adopted.slot] = model.caches.states[sent.slot]
        rows.logprobs["adopted"] = list(rows.logprobs["sent"])
        scheduler.cancel(sent.key[0])
        scheduler.adopt(adopted, sent.generated[0])
        rows.until("adopted", NEW_TOKENS // 2)
        assert rows.run.recomputed == 0 and scheduler.counts.preemptions == 0
        for name in ("urgent", "pressing"):
            scheduler.add(sequence(name, prompts[1]))
        rows.until("adopted", NEW_TOKENS)
        assert scheduler.counts.preemptions > 0 and rows.run.recomputed > 0
        assert adopted.prefix.cached_tokens == 256
        rows.until("urgent", NEW_TOKENS)
        rows.until("pressing", NEW_TOKENS)
        rows.run.rest()
    assert adopted.generated == uncached.tokens[0]
    assert rows.logprobs["adopted"] == uncached.logprobs[0]
    for name in ("first", "urgent", "pressing"):
        assert rows.logprobs[name] == uncached.logprobs[1]
