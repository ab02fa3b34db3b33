"""Scheduler, prefix cache and torch engine together: greedy output equals transformers' `generate`, token
for token, batched and alone, with chunked prefill forced small, with preemption forced by a pool too small,
and from cached prefixes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from transformers import AutoTokenizer

from tests.support.engines import open_engine
from tests.support.families import CONFIGS, DEVICES, make_checkpoint, make_prompt
from tests.support.greedy_reference import greedy_reference
from tests.support.rank import open_late_prefix_cache
from tests.support.scheduled import Answers, run_scheduled
from tests.support.two_ranks import TwoRanks
from transport.messages.generate import SamplingParams
from workers.engine.engine import ModelEngine

TEXT = (
    "The lighthouse keeper climbed the stairs every evening, counting the steps as he went, and lit "
    "the lamp before the fog came in from the sea. "
)
PROMPTS = [
    "Hello", "The capital of France is", "def fibonacci(n):\n", "1 2 3 4 5", "Once upon a time",
    "Ingredients: flour, sugar,", "In 1969,", "Water boils at", "A B C D", "To be or not to be",
    "The quick brown fox", "SELECT name FROM", "Dear Sir or Madam,", "Good morning", "Ünïcödé テスト",
    TEXT * 4 + "At last he", TEXT * 4 + "One night,", TEXT * 4 + "Then", TEXT * 9 + "At last",
    TEXT * 14,
]  # fmt: skip
NEW_TOKENS = 40


class Model(NamedTuple):
    """An engine, prompts, and what `generate` answers."""

    engine: ModelEngine
    open_engine: Callable[[], ModelEngine]
    """Opens one more."""
    prompts: list[list[int]]
    wanted: list[list[int]]

    def run(
        self, which: Iterable[int] | None = None, *, count: int = NEW_TOKENS, **options
    ) -> Answers:
        """`count` greedy tokens for these prompts, or for all, which are checked."""
        chosen = range(len(self.prompts)) if which is None else list(which)
        prompts = [self.prompts[i] for i in chosen]
        greedy = SamplingParams(count, temperature=0.0, ignore_eos=True)
        answers = run_scheduled(self.engine, prompts, sampling=greedy, **options)
        assert answers.tokens == [self.wanted[i][:count] for i in chosen]
        return answers


def check_preempted(answers: Answers) -> None:
    assert answers.preemptions > 0, "the pool was large enough: nothing was tested"
    assert answers.recomputed > 5, "nobody gave way who had answered some"


# ---- the default model -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2(smollm2_dir: Path) -> Iterator[Model]:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    assert max(map(len, prompts)) > 280
    make = functools.partial(open_engine, smollm2_dir, max_model_len=640, max_num_seqs=20)
    engine = make()
    greedy = SamplingParams(NEW_TOKENS, temperature=0.0, ignore_eos=True)
    drafts = run_scheduled(engine, prompts, chunk=512, sampling=greedy).tokens
    yield Model(engine, make, prompts, greedy_reference(smollm2_dir, prompts, NEW_TOKENS, drafts))
    engine.close()


@pytest.mark.slow
@pytest.mark.xdist_group("smollm2-equality")
@pytest.mark.parametrize(
    "options",
    [
        {"chunk": 512, "max_num_seqs": 1, "count": 6},
        {"chunk": 17, "max_num_seqs": 6, "stagger": 3, "count": 16},
    ],
    ids=["alone", "joining midway in small chunks"],
)
def test_smollm2_equals_generate_on_twenty_prompts(smollm2, options):
    smollm2.run(**options)


@pytest.mark.slow
@pytest.mark.xdist_group("smollm2-equality")
def test_smollm2_equals_generate_where_sequences_are_preempted(smollm2):
    """The last five prompts: three of them end a little before a page border."""
    check_preempted(smollm2.run(range(15, 20), chunk=100, num_pages=5))


# ---- every family ----------------------------------------------------------------------------------

LENGTHS = (5, 112, 115, 118, 129, 300)
"""All windows are shorter than the longest. Three reach a page border amid their answers."""
SHARED = 256
"""Tokens of the longest prompt that another one begins with."""


@pytest.fixture(scope="module", params=DEVICES)
def accelerator(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in CONFIGS],
)
def family(request: pytest.FixtureRequest, accelerator: str, tmp_path_factory) -> Iterator[Model]:
    folder = make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    prompts = [make_prompt(length) for length in LENGTHS]
    prompts.append(prompts[-1][:SHARED] + make_prompt(30))
    wanted = greedy_reference(folder, prompts, NEW_TOKENS)
    assert len({tuple(tokens) for tokens in wanted}) == len(prompts)
    make = functools.partial(
        open_engine, folder, accelerator=accelerator, max_num_seqs=len(prompts), max_model_len=512,
        kv_cache_gb=None if accelerator == "cpu" else 0.1,
    )  # fmt: skip
    engine = make()
    yield Model(engine, make, prompts, wanted)
    engine.close()


@pytest.mark.parametrize(
    "options",
    [{"chunk": 512}, {"chunk": 13, "stagger": 3}],
    ids=["batched", "joining midway in small chunks"],
)
def test_a_family_equals_generate(family, options):
    family.run(**options)


def test_a_family_equals_generate_where_sequences_are_preempted(family):
    check_preempted(family.run(chunk=50, num_pages=8))


def test_a_family_equals_generate_from_cached_prefixes(family):
    """Copies end late, sequences are preempted and start again from what they stored, and the cache has
    not room for all."""
    with open_late_prefix_cache(family.engine, host_pages=2) as cache:
        first = family.run(chunk=50, num_pages=8, stagger=2, prefixes=cache)
        check_preempted(first)
        assert first.cached[-1] == SHARED
        again = family.run(chunk=100, num_pages=8, stagger=2, prefixes=cache)
        assert any(again.cached)
        assert cache.cache.stats().counts.evicted_pages > 0


def test_what_a_load_still_reads_is_not_given_to_a_store(family):
    """The cache holds the hit of the first prompt alone when the second one wants to be stored."""
    with open_late_prefix_cache(family.engine, host_pages=SHARED // 128, delay=12) as cache:
        family.run([5], count=2, chunk=512, prefixes=cache)
        answers = family.run([5, 4], count=4, chunk=64, prefixes=cache)
        assert answers.cached == [SHARED, 0]


def test_a_family_equals_generate_on_two_ranks_one_of_which_is_lost(family):
    """The router places the prompts. What the lost rank had begun goes on at the other one."""
    with contextlib.closing(family.open_engine()) as other:
        ranks = TwoRanks([family.engine, other], chunk=50)
        for ids in family.prompts:
            ranks.submit(ids, SamplingParams(NEW_TOKENS, temperature=0.0, ignore_eos=True))
        while not any(len(tokens) >= NEW_TOKENS // 2 for tokens in ranks.tokens.values()):
            ranks.turn()
        ranks.lose(1)
        ranks.run()
        assert len(ranks.moved) > 1
    assert min(ranks.generated.values()) > NEW_TOKENS // 2
    assert [ranks.tokens[str(i)] for i in range(len(family.prompts))] == family.wanted
