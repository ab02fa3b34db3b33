"""A step is chosen, filled and committed apart, so that ranks can vote in between; placeholders."""

from __future__ import annotations

import contextlib
import copy
import os
import random
from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.pool.segment import create_segment
from tests.support.rank import Rank
from transport.ids import RequestId
from workers.scheduling.step import InFlightStep, StepDraft, StepKind

VOCAB = 23
PAGE = 8
PROMPTS = st.builds(
    lambda pages, tail: [page for page in pages for _ in range(PAGE)] + tail,
    st.lists(st.integers(0, 2), max_size=5),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=PAGE + 3),
)
TRAFFIC = st.lists(
    st.tuples(PROMPTS, st.integers(1, 12), st.integers(0, 20), st.integers(0, 2)),
    min_size=1,
    max_size=8,
)
"""Prompt, output, turn of its arrival, priority."""


def launch(rank, step: InFlightStep) -> None:
    rank.transfers.load(step.plan.loads, step.plan.written_pages)
    step.launched = rank.engine.launch(step.plan)
    rank.transfers.store(step.plan.stores)


def collect(rank, most: int) -> None:
    """Leave at most so many steps in flight."""
    while rank.scheduler.num_in_flight > most:
        for row in rank.scheduler.collect().rows:
            rank.got.setdefault(row.sequence.key[0], []).append(row.token)
    rank.transfers.poll()
    rank.scheduler.check_integrity()


def by_votes(rank) -> InFlightStep | None:
    """The next step of a lone rank, whose votes are all for what it wants."""
    scheduler = rank.scheduler
    draft = scheduler.fill(scheduler.next_kind())
    if not draft.rows:
        draft = scheduler.fill(StepKind.DECODE)
    return scheduler.commit(draft) if draft.rows else None


def gist(step: InFlightStep | None) -> object:
    if step is None:
        return None
    plan = step.plan
    chunks = [
        (c.slot, c.start, c.tokens.tolist(), c.pages, c.sample, c.begin) for c in plan.prompts
    ]
    loads = [(load.slot, load.pages) for load in plan.loads]
    stores = [(store.slot, store.pages, store.plan.host_pages.tolist()) for store in plan.stores]
    return chunks, plan.decodes, plan.new_pages, loads, stores


@given(TRAFFIC, st.integers(13, 24), st.integers(1, 5), st.integers(3, 40), st.integers(0, 1))
def test_a_lone_rank_that_votes_runs_the_steps_of_one_that_does_not(
    traffic, num_pages, max_num_seqs, budget, depth
):
    with contextlib.ExitStack() as stack:
        ranks = []
        for _ in range(2):
            fd = create_segment("test")
            stack.callback(os.close, fd)
            ranks.append(
                Rank(fd, 5, 11, num_pages=num_pages, max_num_seqs=max_num_seqs, budget=budget,
                           depth=depth)
            )  # fmt: skip
            stack.callback(ranks[-1].close)
        plain, voting = ranks
        for turn in range(300):
            for number, (prompt, output, at, priority) in enumerate(traffic):
                if at == turn:
                    for rank in ranks:
                        rank.add(number, prompt, output, priority=priority)
            before = astuple(voting.scheduler.counts)
            assert voting.scheduler.next_kind() is voting.scheduler.next_kind()
            assert astuple(voting.scheduler.counts) == before
            steps = plain.scheduler.next_step(), by_votes(voting)
            assert gist(steps[0]) == gist(steps[1])
            for rank, step in zip(ranks, steps, strict=True):
                if step is not None:
                    launch(rank, step)
                collect(rank, depth if step is not None else 0)
        assert plain.got == voting.got
        for rank in ranks:
            rank.check_rest()


@given(TRAFFIC, st.integers(13, 24), st.integers(1, 5), st.integers(3, 40), st.integers(0, 1),
       st.integers(0, 1 << 30))  # fmt: skip
def test_steps_of_any_kind_may_be_filled_and_dropped_and_placeholders_come_between(
    traffic, num_pages, max_num_seqs, budget, depth, seed
):
    """Whatever the others want, everybody gets its tokens."""
    rng = random.Random(seed)
    with contextlib.ExitStack() as stack:
        fd = create_segment("test")
        stack.callback(os.close, fd)
        rank = Rank(fd, 5, 11, num_pages=num_pages, max_num_seqs=max_num_seqs, budget=budget,
                          depth=depth)  # fmt: skip
        stack.callback(rank.close)
        scheduler = rank.scheduler
        pending = dict(enumerate(traffic))
        for turn in range(3000):
            for number, (prompt, output, at, priority) in list(pending.items()):
                if at == turn:
                    rank.add(number, prompt, output, priority=priority)
                    del pending[number]
            draft = scheduler.fill(rng.choice(list(StepKind)))
            scheduler.check_integrity()
            if draft.rows and rng.random() < 0.3:
                scheduler.drop(draft)
                scheduler.check_integrity()
                continue
            launch(rank, scheduler.commit(draft))
            collect(rank, depth)
            if not pending and not scheduler.num_waiting and not scheduler.num_running:
                break
        else:
            raise AssertionError("it never came to rest")
        collect(rank, 0)
        for number, (prompt, output, _, _) in enumerate(traffic):
            assert rank.tokens_of(number) == rank.simulate(prompt, output)
        rank.run()
        rank.check_rest()


def vote(ranks) -> list[StepDraft]:
    """The next step of ranks that must all run the same kind at the same time: prompts if any wants to
    and some rank can fill such a step, else decodes if anybody decodes."""
    wanted = {rank.scheduler.next_kind() for rank in ranks}
    for kind in (StepKind.PROMPT, StepKind.DECODE):
        if kind in wanted or kind is StepKind.DECODE:
            drafts = [rank.scheduler.fill(kind) for rank in ranks]
            if any(draft.rows for draft in drafts):
                return drafts
    return []


@given(TRAFFIC, TRAFFIC, st.integers(13, 24), st.integers(3, 40), st.integers(0, 1))
def test_ranks_that_vote_run_one_kind_together_and_get_all_tokens(
    first, second, num_pages, budget, depth
):
    with contextlib.ExitStack() as stack:
        ranks = []
        for _ in range(2):
            fd = create_segment("test")
            stack.callback(os.close, fd)
            ranks.append(Rank(fd, 5, 11, num_pages=num_pages, budget=budget, depth=depth))
            stack.callback(ranks[-1].close)
        for turn in range(2000):
            for rank, traffic in zip(ranks, (first, second), strict=True):
                for number, (prompt, output, at, priority) in enumerate(traffic):
                    if at == turn:
                        rank.add(number, prompt, output, priority=priority)
            drafts = vote(ranks)
            assert len({draft.kind for draft in drafts}) <= 1
            for rank, draft in zip(ranks, drafts, strict=False):
                launch(rank, rank.scheduler.commit(draft))
            for rank in ranks:
                collect(rank, depth if drafts else 0)
            busy = any(r.scheduler.num_waiting or r.scheduler.num_running for r in ranks)
            if turn > 20 and not drafts and not busy:
                break
        else:
            raise AssertionError("they never came to rest")
        for rank, traffic in zip(ranks, (first, second), strict=True):
            for number, (prompt, output, _, _) in enumerate(traffic):
                assert rank.tokens_of(number) == rank.simulate(prompt, output)
            rank.run()
            rank.check_rest()


@pytest.mark.parametrize("kind", list(StepKind))
def test_a_placeholder_leaves_all_books_unchanged(make_rank, kind):
    rank = make_rank(5, 11)
    scheduler = rank.scheduler
    for number in range(3):
        rank.add(number, [number] * 30, 5)
    for _ in range(4):
        rank.turn()

    def books() -> object:
        live = list(scheduler._live())
        own = ("status", "num_computed", "in_flight", "epoch", "slot", "pages", "num_tokens")
        return copy.deepcopy([
            [[getattr(s, name) for name in own] for s in live],
            [[s.prefix.num_computed, s.prefix.cached_tokens, s.prefix.state_cut] for s in live],
            scheduler.counts, scheduler.blocks.pages_used, scheduler.blocks.slots_used,
            scheduler.next_kind(), scheduler.num_in_flight, rank.cache.stats().counts,
        ])  # fmt: skip

    before = books()
    step = scheduler.commit(StepDraft(kind))
    assert step.plan.prompts == step.plan.decodes == ()
    launch(rank, step)
    assert scheduler.collect().rows == []
    scheduler.check_integrity()
    assert books() == before


def test_a_draft_does_not_outlive_its_sequences(make_rank):
    rank = make_rank()
    rank.add(0, [1] * 10, 3)
    draft = rank.scheduler.fill(StepKind.PROMPT)
    rank.cancel(0)
    with pytest.raises(ValueError, match="its sequences changed"):
        rank.scheduler.commit(draft)
    assert RequestId("r0") not in rank.got


def test_a_dropped_chunk_makes_nobody_wait_for_its_prompt(make_rank):
    """Who begins alike waits where less is left to compute than it would save, and all is left here."""
    rank = make_rank(budget=100)
    common = [1, 2, 3, 4, 5, 6, 7, 8] * 3
    rank.add(0, [*common, *range(9, 20)] * 2, 1)
    draft = rank.scheduler.fill(StepKind.PROMPT)
    assert [row.stop for row in draft.rows] == [70]
    rank.scheduler.drop(draft)
    rank.add(1, [*common, 9], 1, priority=-1)
    draft = rank.scheduler.fill(StepKind.PROMPT)
    assert [row.sequence.key[0] for row in draft.rows] == ["r1", "r0"]
