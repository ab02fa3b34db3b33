"""Random traffic with shared beginnings through scheduler, prefix cache and the checking fake engine.

The fake's tokens depend on every earlier token as pages have them, and on the last ones as the slot's
state has them. So equality with a straight simulation shows that whatever was loaded was right.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.host_pool import HostPool, PoolGeometry
from hicache.prefix_cache import PrefixCache
from hicache.segment import create_segment
from transport.ids import ProcessName, RequestId
from transport.messages import SamplingParams
from workers.fake_engine import FakeCopies, FakeEngine, FakeEngineSettings, fake_next_token
from workers.prefix_reuse import PrefixReuse
from workers.prefix_transfer import PrefixTransfers
from workers.scheduler import Scheduler
from workers.sequence import Sequence

VOCAB = 23
PAGE = 8
PLENTY = 1 << 40


class LateCopies:
    """Copies that are over only at the `delay`-th question. Pages are stored as late as a GPU may do it:
    when the copy is over, or when a step or a load is about to overwrite them."""

    def __init__(self, copies: FakeCopies, delay: int) -> None:
        self._copies = copies
        self._delay = delay
        self._stores: list[tuple[set[int], _Late]] = []

    def before_overwrite(self, pages) -> None:
        for stored, late in self._stores:
            if stored & set(pages.tolist()):
                late.make()
        self._stores = [(stored, late) for stored, late in self._stores if late.left >= 0]

    def close(self) -> None:
        """Let go of the pool, as a worker does that ends amid copies."""
        self._stores.clear()
        del self._copies

    def load_pages(self, pages, host_slots):
        self.before_overwrite(pages)
        self._copies.load_pages(pages, host_slots)
        return _Late(self._delay)

    def store_pages(self, pages, host_slots):
        late = _Late(self._delay, lambda: self._copies.store_pages(pages, host_slots))
        self._stores.append((set(pages.tolist()), late))
        return late

    def load_state(self, *arguments):
        self._copies.load_state(*arguments)
        return _Late(self._delay)

    def store_state(self, *arguments):
        self._copies.store_state(*arguments)
        return _Late(self._delay)


@dataclass
class _Late:
    left: int
    copy: Callable[[], object] | None = None

    def make(self) -> None:
        copy, self.copy = self.copy, None
        if copy is not None:
            copy()

    def done(self) -> bool:
        self.left -= 1
        if self.left < 0:
            self.make()
        return self.left < 0


@dataclass
class Model:
    window: int
    keep: int
    num_pages: int = 24
    max_num_seqs: int = 4


class Rank:
    """What a worker is made of, without its sockets."""

    def __init__(self, fd: int, model: Model, host_pages: int, host_states: int, *, delay: int = 0,
                 budget: int = 20, depth: int = 0) -> None:  # fmt: skip
        self.engine = FakeEngine(
            FakeEngineSettings(
                vocab_size=VOCAB, num_pages=model.num_pages, max_num_seqs=model.max_num_seqs,
                max_model_len=160, page_tokens=PAGE, pipeline_depth=depth, window=model.window,
                keep_tokens=model.keep,
            )
        )  # fmt: skip
        layout = self.engine.info.layout
        states = host_states if model.window else 0
        geometry = PoolGeometry(
            layout.fingerprint, layout.page_bytes, host_pages, layout.stored_state_bytes, states
        )
        self.pool = HostPool(fd, geometry, PLENTY)
        self.cache = PrefixCache(
            self.pool,
            page_tokens=PAGE,
            replay_tokens=layout.replay_tokens,
            max_pending_bytes=PLENTY,
        )
        copies = self.engine.cache_copies(self.pool)
        self.copies = LateCopies(copies, delay)
        self.transfers = PrefixTransfers(self.cache, self.pool, self.copies)
        reuse = PrefixReuse(self.cache, layout.keep_tokens)
        self.scheduler = Scheduler(self.engine.info, budget, 2, reuse)
        self.depth = depth
        self.got: dict[RequestId, list[int]] = {}
        self.cached: dict[RequestId, int] = {}

    def turn(self) -> bool:
        """As the worker's loop does it. False: there was nothing to do."""
        plan = self.scheduler.plan()
        self.scheduler.check_integrity()
        if plan is not None:
            self.transfers.load(plan.loads)
            self.copies.before_overwrite(plan.written_pages())
            self.engine.launch(plan)
            self.transfers.store(plan.stores)
        worked = self.scheduler.num_launched > (self.depth if plan is not None else 0)
        if worked:
            output = self.scheduler.apply(self.engine.collect())
            for sequence in output.started:
                self.cached[sequence.key[0]] = sequence.cached_tokens
            for row in output.rows:
                self.got.setdefault(row.sequence.key[0], []).append(row.token)
        has_arrived = self.transfers.poll()
        self.cache.check_integrity()
        return worked or has_arrived or plan is not None or self.transfers.num_open > 0

    def run(self) -> None:
        for _ in range(5000):
            if not self.turn():
                return
        raise AssertionError("it never came to rest")

    def close(self) -> None:
        self.transfers.close()
        self.copies.close()
        self.pool.close()

    def check_rest(self) -> None:
        assert self.scheduler.pages_used == self.scheduler.slots_used == 0
        assert self.cache.stats().pages_pinned == 0
        assert self.cache.stats().pending_bytes == 0


def make_sequence(number: int, prompt: list[int], output: int, **changes) -> Sequence:
    return Sequence(
        key=(RequestId(f"r{number}"), 0), frontend=ProcessName("frontend/0"),
        prompt=np.asarray(prompt, np.int32), prompt_len=len(prompt),
        sampling=SamplingParams(max_tokens=output), seed=0, arrival=float(number),
        **{"uses_prefix_cache": True, **changes},
    )  # fmt: skip


def simulate(prompt: list[int], output: int, window: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(output):
        tokens.append(fake_next_token(np.asarray(tokens, np.int32), VOCAB, window))
    return tokens[len(prompt) :]


@pytest.fixture
def segment() -> Iterator[int]:
    fd = create_segment("test")
    yield fd
    os.close(fd)


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

    def sequence(self, number: int) -> Sequence:
        return make_sequence(
            number, self.prompt, self.output,
            uses_prefix_cache=self.uses_cache, cache_salt=self.salt,
        )  # fmt: skip


WANTED = st.builds(
    Wanted, PROMPTS, st.integers(1, 12), st.integers(0, 40), st.none() | st.integers(0, 15),
    st.sampled_from([True, True, True, False]), st.sampled_from(["", "", "other"]),
)  # fmt: skip
MODELS = st.sampled_from([Model(0, 0), Model(5, 11), Model(8, 8), Model(16, 17), Model(5, 11, 21)])


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
)
def test_tokens_are_those_of_a_run_without_a_cache(
    traffic, model, host_pages, host_states, delay, budget, depth, dies_at, flush_at
):
    with contextlib.ExitStack() as stack:
        fd = create_segment("test")
        stack.callback(os.close, fd)
        options = {"delay": delay, "budget": budget, "depth": depth}
        rank = Rank(fd, model, host_pages, host_states, **options)
        got: dict[RequestId, list[int]] = {}
        cancelled: set[int] = set()
        pending = deque(sorted(range(len(traffic)), key=lambda number: traffic[number].at))
        for now in range(2000):
            if now == dies_at:
                # A new worker on the old pool; the router sends everything unfinished once more.
                rank.close()
                got |= rank.got
                rank = Rank(fd, model, host_pages, host_states, **options)
                for number, wanted in enumerate(traffic):
                    done = got.get(RequestId(f"r{number}"), [])
                    if number in pending or number in cancelled or len(done) == wanted.output:
                        continue
                    rank.got[RequestId(f"r{number}")] = done
                    again = wanted.sequence(number)
                    again.prompt = np.asarray(wanted.prompt + done, np.int32)
                    again.num_tokens = len(again.prompt)
                    rank.scheduler.add(again)
            if now == flush_at:
                rank.cache.flush()
            while pending and traffic[pending[0]].at <= now:
                number = pending.popleft()
                wanted = traffic[number]
                rank.scheduler.add(wanted.sequence(number))
            for number, wanted in enumerate(traffic):
                stops_at = None if wanted.cancel_after is None else wanted.at + wanted.cancel_after
                if stops_at == now and rank.scheduler.cancel(RequestId(f"r{number}")):
                    cancelled.add(number)
            if not rank.turn() and not pending and now > 60:
                break
        else:
            raise AssertionError("it never came to rest")
        got |= rank.got
        for number, wanted in enumerate(traffic):
            tokens = simulate(wanted.prompt, wanted.output, model.window)
            mine = got.get(RequestId(f"r{number}"), [])
            assert mine == (tokens[: len(mine)] if number in cancelled else tokens)
        rank.check_rest()
        rank.close()


@pytest.mark.parametrize(("window", "keep"), [(0, 0), (5, 11)])
def test_the_same_prompt_again_leaves_no_more_than_it_must(segment, window, keep):
    rank = Rank(segment, Model(window, keep), host_pages=30, host_states=8)
    prompt = list(range(20)) * 3
    for number in range(2):
        rank.scheduler.add(make_sequence(number, prompt, 3))
        rank.run()
    assert rank.cached[RequestId("r0")] == 0
    least_left = max(1, keep)
    assert rank.cached[RequestId("r1")] == (len(prompt) - least_left) // PAGE * PAGE
    rank.close()


def test_prompts_that_come_together_compute_their_common_beginning_once(segment):
    rank = Rank(segment, Model(5, 11), host_pages=30, host_states=8, delay=2)
    common = [1, 2, 3, 4, 5, 6, 7] * 6
    for number in range(4):
        rank.scheduler.add(make_sequence(number, [*common, number, number], 2))
    rank.run()
    # The window's state is kept at the last page border that leaves enough to replay.
    saved = (len(common) + 2 - 11) // PAGE * PAGE
    assert [rank.cached[RequestId(f"r{n}")] for n in range(4)] == [0, saved, saved, saved]
    assert rank.scheduler.counts.prompt_tokens == 4 * (len(common) + 2) - 3 * saved
    rank.check_rest()
    rank.close()


def test_a_beginning_that_prompts_share_gets_a_state_where_they_part(segment):
    """As with one system prompt and many questions: the first prompt leaves states at its own end
    only, the second one finds the pages and leaves a state where they end, the third one starts there."""
    rank = Rank(segment, Model(5, 11), host_pages=60, host_states=8)
    system = [1, 2, 3, 4, 5, 6, 7, 8] * 3
    questions = [[9] * 30, [10] * 30, [11] * 30, [12] * 30]
    for number, question in enumerate(questions):
        rank.scheduler.add(make_sequence(number, system + question, 3))
        rank.run()
        assert rank.got[RequestId(f"r{number}")] == simulate(system + question, 3, 5)
    cached = [rank.cached[RequestId(f"r{number}")] for number in range(4)]
    assert cached == [0, 0, len(system), len(system)]
    rank.check_rest()
    rank.close()


def test_nobody_waits_for_a_prompt_that_takes_longer_than_what_it_would_save(segment):
    rank = Rank(segment, Model(0, 0), host_pages=30, host_states=0, budget=PAGE)
    common = [3] * PAGE
    rank.scheduler.add(make_sequence(0, common + [5] * 80, 1))
    rank.turn()
    rank.scheduler.add(make_sequence(1, [*common, 9], 1, priority=-1))
    rank.turn()
    rank.turn()
    assert rank.got[RequestId("r1")] == simulate([*common, 9], 1, 0)
    assert rank.cached[RequestId("r1")] == 0
    rank.run()
    rank.close()


def test_the_one_that_is_waited_for_may_go_away(segment):
    rank = Rank(segment, Model(0, 0), host_pages=30, host_states=0, budget=PAGE)
    common = [3] * 40
    for number in range(2):
        rank.scheduler.add(make_sequence(number, [*common, number], 2))
    rank.turn()
    rank.turn()
    assert RequestId("r1") not in rank.cached
    rank.scheduler.cancel(RequestId("r0"))
    rank.run()
    assert rank.got[RequestId("r1")] == simulate([*common, 1], 2, 0)
    rank.check_rest()
    rank.close()


def test_a_request_may_stay_out_of_the_cache(segment):
    rank = Rank(segment, Model(0, 0), host_pages=30, host_states=0)
    prompt = [4] * 50
    rank.scheduler.add(make_sequence(0, prompt, 1, uses_prefix_cache=False))
    rank.run()
    assert rank.cache.stats().pages_used == 0  # it has stored nothing
    rank.scheduler.add(make_sequence(1, prompt, 1))
    rank.run()
    rank.scheduler.add(make_sequence(2, prompt, 1, uses_prefix_cache=False))
    rank.scheduler.add(make_sequence(3, prompt, 1, cache_salt="another tenant"))
    rank.scheduler.add(make_sequence(4, prompt, 1))
    rank.run()
    assert [rank.cached[RequestId(f"r{n}")] for n in (2, 3, 4)] == [0, 0, 48]
    rank.close()
