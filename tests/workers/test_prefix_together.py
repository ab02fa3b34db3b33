"""Prompts that arrive together: what they share is computed once, and looking for it stays cheap."""

from __future__ import annotations

from collections import Counter

import pytest

PAGE = 8
SYSTEM = [1, 2, 3, 4, 5, 6, 7] * 20
"""140 tokens: prompts that go on in different ways share 17 pages of it."""
SHARED = 136
WINDOW, KEEP = 5, 11


def question(number: int, length: int) -> list[int]:
    """Differs from all others in its first token."""
    return [8 + number, *[number % 7] * (length - 1)]


@pytest.mark.parametrize("tail", [3, 20, 90])
@pytest.mark.parametrize("budget", [10_000, 128, 20])
@pytest.mark.parametrize(("delay", "depth"), [(0, 0), (3, 1)])
def test_a_system_prompt_with_many_questions_is_computed_once(
    make_rank, tail, budget, delay, depth
):
    rank = make_rank(WINDOW, KEEP, num_pages=400, max_num_seqs=12, host_pages=400, host_states=40,
                     budget=budget, delay=delay, depth=depth)  # fmt: skip
    prompts = [SYSTEM + question(number, tail) for number in range(12)]
    for number, prompt in enumerate(prompts):
        rank.add(number, prompt, 2)
    rank.run()
    saved = min(SHARED, (len(SYSTEM) + tail - KEEP) // PAGE * PAGE)
    assert rank.cached_of(*range(12)) == [0] + [saved] * 11
    assert rank.scheduler.counts.prompt_tokens == sum(map(len, prompts)) - 11 * saved
    for number, prompt in enumerate(prompts):
        assert rank.tokens_of(number) == rank.simulate(prompt, 2)
    rank.check_rest()


def test_prompts_that_part_in_several_places_share_what_they_can(make_rank):
    """Three groups with a beginning of their own after the common one."""
    rank = make_rank(WINDOW, KEEP, num_pages=400, max_num_seqs=9, host_pages=400, host_states=40,
                     budget=128)  # fmt: skip
    groups = [SYSTEM[:40] + [10 + group] * 80 for group in range(3)]
    for number in range(9):
        rank.add(number, groups[number % 3] + question(number, 40), 2)
    rank.run()
    leaders, others = rank.cached_of(0, 1, 2), rank.cached_of(*range(3, 9))
    assert leaders == [0, 40, 40]
    assert others == [120] * 6
    rank.check_rest()


def test_a_prompt_that_comes_while_another_is_computed_gets_its_state_from_that(make_rank):
    rank = make_rank(WINDOW, KEEP, num_pages=100, host_pages=100, budget=40)
    rank.add(0, SYSTEM + question(0, 200), 2)
    rank.turn()
    rank.turn()
    rank.add(1, SYSTEM + question(1, 50), 2)
    rank.run()
    assert rank.cached_of(0, 1) == [0, SHARED]
    rank.check_rest()


def test_one_that_is_past_the_place_is_not_waited_for(make_rank):
    rank = make_rank(WINDOW, KEEP, num_pages=100, host_pages=100, budget=160)
    rank.add(0, SYSTEM + question(0, 400), 2)
    rank.turn()
    rank.add(1, SYSTEM + question(1, 50), 2, priority=-1)
    rank.turn()
    assert rank.scheduler.num_waiting == 2 and rank.has_started(1)
    rank.run()
    assert rank.cached_of(0, 1) == [0, 0]
    rank.check_rest()


def test_when_the_one_that_computes_goes_away_another_takes_its_place(make_rank):
    rank = make_rank(WINDOW, KEEP, num_pages=100, host_pages=100, budget=20)
    for number in range(4):
        rank.add(number, SYSTEM + question(number, 50), 2)
    for _ in range(3):
        rank.turn()
    rank.cancel(0)
    rank.run()
    assert rank.cached_of(1, 2, 3) == [0, SHARED, SHARED]
    rank.check_rest()


def test_a_prompt_is_not_cut_where_it_leaves_a_state_anyway(make_rank):
    """Its pages are there up to its own anchor, the states were evicted."""
    rank = make_rank(WINDOW, KEEP, num_pages=100, host_pages=100, host_states=2, budget=1000)
    for number, prompt in enumerate((SYSTEM, [9] * 100, SYSTEM)):
        rank.add(number, prompt, 1)
        rank.run()
    assert rank.cached_of(0, 1, 2) == [0, 0, 0]
    assert rank.cache.stats().counts.capped_tokens == (len(SYSTEM) - KEEP) // PAGE * PAGE
    assert rank.scheduler.counts.prompt_steps == 3


def test_the_first_in_rank_does_not_wait_for_one_that_does_not_get_on(make_rank):
    """The last in rank computes what the first one waits for, and gets nothing of the steps any more."""
    rank = make_rank(num_pages=200, host_pages=100, budget=16)
    last = [*SYSTEM, 9]
    rank.add(0, last, 2, priority=5)
    for _ in range(5):
        rank.turn()
    rank.add(1, [*SYSTEM, 10], 2, priority=0)
    rank.turn()
    assert not rank.has_started(1), "the rest is less than all of it"
    rank.add(2, [11] * 600, 2, priority=1)
    for _ in range(20):
        rank.turn()
    assert rank.tokens_of(1) == rank.simulate([*SYSTEM, 10], 2)
    assert rank.scheduler.num_waiting == 2
    rank.run()
    rank.check_rest()


@pytest.mark.parametrize(("window", "keep", "tail"), [(0, 0, 3), (WINDOW, KEEP, 30)])
def test_many_that_wait_are_not_looked_up_at_every_step(make_rank, monkeypatch, window, keep, tail):
    """The work is of the order of the prompts that wait, not of prompts times steps."""
    count, steps = 80, len(SYSTEM) // PAGE
    rank = make_rank(window, keep, num_pages=4000, host_pages=4000, host_states=99, budget=PAGE)
    calls: Counter[str] = Counter()

    def count_calls(owner, name: str) -> None:
        call = getattr(owner, name)

        def counting(*arguments):
            calls[name] += 1
            return call(*arguments)

        monkeypatch.setattr(owner, name, counting)

    count_calls(rank.cache, "keys")
    count_calls(rank.cache, "findable_tokens")
    count_calls(rank.prefills, "announced")
    prefill = rank.scheduler._prefill
    next_chunk = prefill._next_chunk

    def add_and_leave_room(sequence, budget):
        """All that wait are looked at in every step."""
        return next_chunk(sequence, PAGE)

    monkeypatch.setattr(prefill, "_next_chunk", add_and_leave_room)
    prefill._max_batched_tokens = 10 * PAGE
    for number in range(count):
        rank.add(number, SYSTEM + question(number, tail), 1)
    for _ in range(steps - 1):
        rank.turn()
    assert [rank.has_started(n) for n in range(count)] == [True] + [False] * (count - 1)
    assert calls["keys"] == count
    assert count - 1 <= calls["announced"] <= 2 * count
    assert calls["findable_tokens"] <= 2 * count
    monkeypatch.undo()
    rank.run()
    assert rank.cached_of(*range(count)) == [0] + [SHARED] * (count - 1)


def test_nobody_is_let_in_with_pages_that_a_prompt_cut_for_its_state_still_needs(make_rank):
    rank = make_rank(5, 11, num_pages=10, host_pages=60, budget=200)
    system = [1, 2, 3, 4, 5, 6, 7, 8] * 3
    rank.add(0, [*system, *[9] * 30], 1)
    rank.run()
    prompts = {1: [*system, *[10] * 40], 2: [11] * 24}
    for number, prompt in prompts.items():
        rank.add(number, prompt, 8)
    rank.run()
    assert rank.scheduler.counts.preemptions == 0
    for number, prompt in prompts.items():
        assert rank.tokens_of(number) == rank.simulate(prompt, 8)
