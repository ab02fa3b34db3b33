"""Random traffic with shared beginnings through scheduler, prefix cache and the checking fake engine.

Its tokens are right only if whatever was loaded was right: see `conftest.py`.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.pool.segment import create_segment
from tests.support.rank import Rank

VOCAB = 23
PAGE = 8


# Prompts are chains of few different pages, with a tail: many share a beginning.
PROMPTS = st.builds(
    lambda pages, tail: [page for page in pages for _ in range(PAGE)] + tail,
    st.lists(st.integers(0, 2), max_size=7),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=PAGE + 3),
)


@dataclass
class Wanted:
    prompt: list[int]
    output: int
    at: int
    cancel_after: int | None
    uses_cache: bool
    salt: str

    def send(self, rank, number: int, done: tuple[int, ...] = ()) -> None:
        """`done`: tokens that it got elsewhere."""
        rank.add(
            number, [*self.prompt, *done], self.output, prompt_len=len(self.prompt),
            prefix_cache=self.uses_cache, cache_salt=self.salt,
        )  # fmt: skip


WANTED = st.builds(
    Wanted, PROMPTS, st.integers(1, 12), st.integers(0, 40), st.none() | st.integers(0, 15),
    st.sampled_from([True, True, True, False]), st.sampled_from(["", "", "other"]),
)  # fmt: skip
# Window, tokens to keep, pages of the device.
MODELS = st.sampled_from([(0, 0, 24), (5, 11, 24), (8, 8, 24), (16, 17, 24), (5, 11, 21)])


@settings(max_examples=120)
@given(
    traffic=st.lists(WANTED, min_size=1, max_size=12),
    model=MODELS,
    host_pages=st.integers(1, 30),
    host_states=st.integers(1, 6),
    delay=st.integers(0, 12),
    budget=st.integers(3, 40),
    depth=st.integers(0, 1),
    dies_at=st.none() | st.integers(1, 50),
    flush_at=st.none() | st.integers(1, 50),
    refused=st.sets(st.sampled_from(["store_pages", "store_state"])),
    refused_until=st.integers(0, 40),
)
def test_tokens_are_those_of_a_run_without_a_cache(
    traffic,
    model,
    host_pages,
    host_states,
    delay,
    budget,
    depth,
    dies_at,
    flush_at,
    refused,
    refused_until,
):
    with contextlib.ExitStack() as stack:
        fd = create_segment("test")
        stack.callback(os.close, fd)
        window, keep, num_pages = model
        options = {
            "num_pages": num_pages, "host_pages": host_pages, "host_states": host_states,
            "delay": delay, "budget": budget, "depth": depth,
        }  # fmt: skip
        rank = Rank(fd, window, keep, **options)
        cancelled: set[int] = set()
        pending = deque(sorted(range(len(traffic)), key=lambda number: traffic[number].at))
        for now in range(2000):
            if now == dies_at:
                # A new worker on the old pool; the router sends everything unfinished once more.
                rank.close()
                got = rank.got
                rank = Rank(fd, window, keep, **options)
                rank.got = got
                for number, wanted in enumerate(traffic):
                    done = rank.tokens_of(number)
                    if number in pending or number in cancelled or len(done) == wanted.output:
                        continue
                    wanted.send(rank, number, done)
            rank.copies.refused = refused if now < refused_until else set()
            if now == flush_at:
                rank.cache.flush()
            while pending and traffic[pending[0]].at <= now:
                number = pending.popleft()
                traffic[number].send(rank, number)
            for number, wanted in enumerate(traffic):
                stops_at = None if wanted.cancel_after is None else wanted.at + wanted.cancel_after
                if stops_at == now and rank.cancel(number):
                    cancelled.add(number)
            if not rank.turn() and not pending and now > 60:
                break
        else:
            raise AssertionError("it never came to rest")
        for number, wanted in enumerate(traffic):
            tokens = rank.simulate(wanted.prompt, wanted.output)
            mine = rank.tokens_of(number)
            assert mine == (tokens[: len(mine)] if number in cancelled else tokens)
        rank.check_rest()
        rank.close()


@pytest.mark.parametrize(("window", "keep"), [(0, 0), (5, 11)])
def test_the_same_prompt_again_leaves_no_more_than_it_must(make_rank, window, keep):
    rank = make_rank(window, keep)
    prompt = list(range(20)) * 3
    for number in range(2):
        rank.add(number, prompt, 3)
        rank.run()
    least_left = max(1, keep)
    assert rank.cached_of(0, 1) == [0, (len(prompt) - least_left) // PAGE * PAGE]


def test_prompts_that_come_together_compute_their_common_beginning_once(make_rank):
    rank = make_rank(5, 11, delay=2)
    common = [1, 2, 3, 4, 5, 6, 7] * 6
    for number in range(4):
        rank.add(number, [*common, number, number], 2)
    rank.run()
    # The window's state is kept at the last page border that leaves enough to replay.
    saved = (len(common) + 2 - 11) // PAGE * PAGE
    assert rank.cached_of(0, 1, 2, 3) == [0, saved, saved, saved]
    assert rank.scheduler.counts.prompt_tokens == 4 * (len(common) + 2) - 3 * saved
    rank.check_rest()


def test_a_beginning_that_prompts_share_gets_a_state_where_they_part(make_rank):
    """As with one system prompt and many questions: the first prompt leaves states at its own end
    only, the second one finds the pages and leaves a state where they end, the third one starts there."""
    rank = make_rank(5, 11, host_pages=60, host_states=8)
    system = [1, 2, 3, 4, 5, 6, 7, 8] * 3
    questions = [[9] * 30, [10] * 30, [11] * 30, [12] * 30]
    for number, question in enumerate(questions):
        rank.add(number, system + question, 3)
        rank.run()
        assert rank.tokens_of(number) == rank.simulate(system + question, 3)
    assert rank.cached_of(0, 1, 2, 3) == [0, 0, len(system), len(system)]
    rank.check_rest()


def test_nobody_waits_for_a_prompt_that_takes_longer_than_what_it_would_save(make_rank):
    rank = make_rank(0, 0, budget=PAGE)
    common = [3] * PAGE
    rank.add(0, common + [5] * 80, 1)
    rank.turn()
    rank.add(1, [*common, 9], 1, priority=-1)
    rank.turn()
    rank.turn()
    assert rank.tokens_of(1) == rank.simulate([*common, 9], 1)
    assert rank.cached_of(1) == [0]
    rank.run()


def test_the_one_that_is_waited_for_may_go_away(make_rank):
    rank = make_rank(0, 0, budget=PAGE)
    common = [3] * 40
    for number in range(2):
        rank.add(number, [*common, number], 2)
    rank.turn()
    rank.turn()
    assert not rank.has_started(1)
    rank.cancel(0)
    rank.run()
    assert rank.tokens_of(1) == rank.simulate([*common, 1], 2)
    rank.check_rest()


def test_a_request_may_stay_out_of_the_cache(make_rank):
    rank = make_rank(0, 0)
    prompt = [4] * 50
    rank.add(0, prompt, 1, prefix_cache=False)
    rank.run()
    assert rank.cache.stats().pages_used == 0  # it has stored nothing
    rank.add(1, prompt, 1)
    rank.run()
    rank.add(2, prompt, 1, prefix_cache=False)
    rank.add(3, prompt, 1, cache_salt="another tenant")
    rank.add(4, prompt, 1)
    rank.run()
    assert rank.cached_of(2, 3, 4) == [0, 0, 48]


def test_a_hit_that_was_not_loaded_yet_goes_with_its_sequence(make_rank):
    """Its pages and its slot are others' then: no later step may load it there."""
    rank = make_rank(5, 11)
    prompt = [4] * 50
    rank.add(0, prompt, 1)
    rank.run()
    scheduler = rank.scheduler
    blocks = scheduler.blocks
    cover = blocks.cover
    # There are pages for what is loaded and none for the first chunk.
    blocks.cover = lambda sequence, stop: min(cover(sequence, stop), 32)
    sequence = rank.add(1, prompt, 1)
    assert scheduler.next_step() is None
    assert sequence.prefix.cached_tokens > 0 and rank.cache.stats().pages_pinned > 0
    rank.cancel(1)
    assert rank.cache.stats().pages_pinned == 0
    blocks.cover = cover
    rank.add(2, [5] * 50, 1)
    assert scheduler.next_step().plan.loads == ()


def test_a_hit_is_loaded_with_the_first_chunk(make_rank):
    rank = make_rank(5, 11)
    prompt = [4] * 50
    rank.add(0, prompt, 1)
    rank.run()
    sequence = rank.add(1, prompt, 1)
    (load,) = rank.scheduler.next_step().plan.loads
    assert (load.slot, load.hit.num_tokens) == (sequence.slot, sequence.prefix.cached_tokens)
    assert list(load.pages) == sequence.pages[: load.hit.num_tokens // PAGE]


def test_a_moved_prompt_takes_nothing_that_reaches_into_its_replayed_rows(make_rank):
    """They are those at the end of what the client sent, not of what has been generated since."""
    rank = make_rank(5, 11)
    tokens = list(range(20)) * 3
    rank.add(0, tokens, 1)
    rank.run()
    rank.add(1, tokens, 4, prompt_len=30)  # its other tokens were generated elsewhere
    rank.run()
    assert rank.cached_of(1)[0] <= 30 - 11
    assert rank.tokens_of(1) == rank.simulate(tokens, 4)[: len(rank.tokens_of(1))]
    rank.check_rest()


def test_what_is_replayed_after_a_preemption_is_what_the_client_sent(make_rank):
    rank = make_rank(5, 11, max_num_seqs=1)
    prompt = list(range(20)) * 2
    rank.add(0, prompt, 30)
    while len(rank.tokens_of(0)) < 20:
        rank.turn()
    rank.add(1, [5] * 9, 2, priority=-1)
    while not rank.tokens_of(1):
        rank.turn()
    assert rank.scheduler.counts.preemptions == 1
    plans = []
    launch = rank.engine.launch
    rank.engine.launch = lambda plan: plans.append(plan) or launch(plan)
    rank.run()
    assert rank.tokens_of(0) == rank.simulate(prompt, 30)
    assert {chunk.replay_from for plan in plans for chunk in plan.prompts} == {len(prompt) - 11}


def test_a_hit_is_kept_until_its_load_is_over(make_rank):
    rank = make_rank(5, 11, delay=4)
    prompt = [4] * 50
    rank.add(0, prompt, 1)
    rank.run()
    rank.add(1, prompt, 1)
    step = rank.scheduler.next_step()
    pinned = []
    rank.transfers.load(step.plan.loads, step.plan.written_pages)
    while rank.transfers.num_open:
        pinned.append(rank.cache.stats().pages_pinned)
        rank.transfers.poll()
    assert len(pinned) > 1 and all(pinned), "its pages could be overwritten while they are read"
    assert rank.cache.stats().pages_pinned == 0


@pytest.mark.parametrize(("window", "keep"), [(0, 0), (5, 11)])
def test_a_store_does_not_write_to_what_a_load_still_reads(make_rank, window, keep):
    rank = make_rank(window, keep, host_pages=7, host_states=2, delay=40, budget=100)
    prompt = [4] * 50
    rank.add(0, prompt, 1)
    rank.run()
    rank.add(1, prompt, 1)
    rank.turn()
    rank.add(2, [5] * 60, 1)  # there is room for it only where the first one's pages are
    rank.run()
    assert rank.cached_of(1)[0] > 0
    assert rank.tokens_of(1) == rank.tokens_of(0) == rank.simulate(prompt, 1)
    rank.check_rest()


@pytest.mark.parametrize(("window", "keep"), [(0, 0), (5, 11)])
def test_a_step_does_not_write_to_what_a_store_still_reads(make_rank, window, keep):
    rank = make_rank(window, keep, num_pages=8, delay=40, budget=100)
    prompt = [4] * 50
    rank.add(0, prompt, 1)
    rank.turn()
    assert rank.transfers.num_open and not rank.scheduler.blocks.pages_used
    rank.add(1, [5] * 50, 1)  # there is room for it only where the first one was
    rank.run()
    rank.add(2, prompt, 1)
    rank.run()
    assert rank.cached_of(2)[0] > 0
    assert rank.tokens_of(2) == rank.tokens_of(0) == rank.simulate(prompt, 1)
    rank.check_rest()


def test_all_copies_that_have_arrived_end_at_once(make_rank):
    rank = make_rank(5, 11, budget=200)
    for number in range(3):
        rank.add(number, [number] * 50, 1)
    step = rank.scheduler.next_step()
    assert len(step.plan.stores) == 3
    rank.engine.launch(step.plan)
    rank.transfers.store(step.plan.stores)
    assert rank.transfers.num_open == 0
