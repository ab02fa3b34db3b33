"""What runs next on one rank: continuous batching over pages and slots, in plain Python.

A step is a prompt step (chunks of prompts, bounded by a token budget) or a decode step (one token for
every running sequence). Prompt steps run at once when nothing decodes; otherwise at most one per
`prefill_any_interval` decode steps, so that arriving prompts do not stop the streams.

Who goes first is `Sequence.order`: priority, then arrival. Pages are handed out chunk by chunk. When
they run out, the sequences last in rank lose theirs and are recomputed later (preemption): the first
in rank always gets on, so nothing starves and nothing deadlocks.

Steps may be planned before the results of earlier ones are known (`pipeline_depth`): sequences then
count what is in flight, and results of a sequence that has meanwhile finished are dropped.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from hicache.manager.null import NO_REUSE, Reuse
from hicache.manager.step_copies import PrefixLoad, PrefixStore
from transport.ids import RequestId
from transport.messages.generate import ALL_CHOICES, FINISH_LENGTH, FINISH_STOP, RUNNING
from workers.contract import (
    DecodeRow,
    EngineInfo,
    PromptChunk,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from workers.scheduling.index_pool import IndexPool
from workers.scheduling.sequence import Sequence, SequenceKey, Status


class TokenRow(NamedTuple):
    """One new token of one sequence."""

    sequence: Sequence
    token: int
    finish: int
    """RUNNING, FINISH_STOP or FINISH_LENGTH."""
    logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class StepOutput:
    """What one collected step means to the clients."""

    step: int
    rows: list[TokenRow]
    started: list[Sequence]
    """Sequences whose first chunk ran in this step."""


@dataclass
class _Launched:
    """Who waits for which result of a launched step, in the plan's order."""

    plan: StepPlan
    waiting: list[tuple[Sequence, int]]
    """Sequence and its epoch at launch."""
    started: list[Sequence]


@dataclass
class SchedulerCounts:
    """Totals since the start."""

    preemptions: int = 0
    prompt_steps: int = 0
    decode_steps: int = 0
    prompt_tokens: int = 0
    """Computed by prompt steps, recomputed ones included."""
    generated_tokens: int = 0


@dataclass
class _PromptBatch:
    """A prompt step under construction."""

    budget: int
    chunks: list[PromptChunk] = field(default_factory=list)
    waiting: list[tuple[Sequence, int]] = field(default_factory=list)
    started: list[Sequence] = field(default_factory=list)
    loads: list[PrefixLoad] = field(default_factory=list)
    stores: list[PrefixStore] = field(default_factory=list)


class Scheduler:
    """Queues, pages and slots of one rank. Not thread-safe."""

    def __init__(
        self,
        engine: EngineInfo,
        max_batched_tokens: int,
        prefill_any_interval: int,
        prefixes: Reuse = NO_REUSE,
    ) -> None:
        self._page_tokens = engine.layout.page_tokens
        self._keep_tokens = engine.layout.keep_tokens
        self._eos = frozenset(engine.eos_token_ids)
        self._max_batched_tokens = max_batched_tokens
        self._interval = prefill_any_interval
        self._pages = IndexPool(engine.num_pages)
        self._slots = IndexPool(engine.max_num_seqs)
        self._sequences: dict[SequenceKey, Sequence] = {}
        self._waiting: list[Sequence] = []  # in `Sequence.order`
        self._running: list[Sequence] = []  # in `Sequence.order`
        self._launched: deque[_Launched] = deque()
        self._prefixes = prefixes
        self._decodes_since_prompt = prefill_any_interval
        self._next_step = 0
        self.counts = SchedulerCounts()

    # ---- what others may know -----------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_launched(self) -> int:
        """Steps launched and not collected."""
        return len(self._launched)

    @property
    def pages_used(self) -> int:
        return self._pages.num_used

    @property
    def num_pages(self) -> int:
        return self._pages.count

    @property
    def slots_used(self) -> int:
        return self._slots.num_used

    @property
    def max_tokens_of_one(self) -> int:
        return self._pages.count * self._page_tokens

    # ---- coming and going -----------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence.

        Raises:
            ValueError: it can never fit into the pool, has no tokens, or its key is taken.
        """
        longest = sequence.prompt_len + sequence.sampling.max_tokens
        if longest > self.max_tokens_of_one:
            raise ValueError(
                f"prompt and output need {longest} tokens, but this rank's pool holds "
                f"{self.max_tokens_of_one}"
            )
        if not len(sequence.prompt) or sequence.key in self._sequences:
            raise ValueError(f"sequence {sequence.key} is empty or already here")
        eos = frozenset[int]() if sequence.sampling.ignore_eos else self._eos
        sequence.stop_tokens = eos.union(sequence.sampling.stop_token_ids)
        self._sequences[sequence.key] = sequence
        insort(self._waiting, sequence, key=lambda other: other.order)
        self._enqueue_prefix(sequence)

    def cancel(self, request_id: RequestId, index: int = ALL_CHOICES) -> list[Sequence]:
        """Drop a choice or all choices of a request, whatever stage they are in. Idempotent.

        Returns the sequences that were dropped."""
        dropped = self._matching(request_id, index)
        for sequence in dropped:
            self._finish(sequence)
        return dropped

    def cancel_all(self) -> None:
        for sequence in list(self._sequences.values()):
            self._finish(sequence)

    def throttle(self, request_id: RequestId, index: int, paused: bool) -> None:
        """Leave a sequence out of decode steps, or take it in again."""
        for sequence in self._matching(request_id, index):
            sequence.paused = paused

    def _matching(self, request_id: RequestId, index: int) -> list[Sequence]:
        if index != ALL_CHOICES:
            found = self._sequences.get((request_id, index))
            return [] if found is None else [found]
        return [s for key, s in self._sequences.items() if key[0] == request_id]

    # ---- planning ---------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None if there is nothing to launch now.

        The caller must launch a returned plan and later `apply` its result."""
        plan = self._plan_prompts() if self._waiting and self._prompts_are_due() else None
        return plan or self._plan_decodes()

    def _prompts_are_due(self) -> bool:
        return self._decodes_since_prompt >= self._interval or not any(
            sequence.may_decode for sequence in self._running
        )

    def _plan_prompts(self) -> StepPlan | None:
        batch = _PromptBatch(self._max_batched_tokens)
        for sequence in list(self._waiting):
            if batch.budget <= 0:
                break
            if sequence.slot is None and self._prefixes.should_wait(sequence.prefix):
                continue
            if not self._add_chunk(batch, sequence):
                break
        if not batch.chunks:
            return None
        plan = StepPlan(
            self._take_step(),
            prompts=tuple(batch.chunks),
            loads=tuple(batch.loads),
            stores=tuple(batch.stores),
        )
        self._launched.append(_Launched(plan, batch.waiting, batch.started))
        self._decodes_since_prompt = 0
        self.counts.prompt_steps += 1
        return plan

    def _add_chunk(self, batch: _PromptBatch, sequence: Sequence) -> bool:
        if sequence.slot is None:
            if not self._admit(sequence):
                return False
            sequence.num_computed = self._prefixes.start(
                sequence.prefix,
                lambda num_tokens: self._cover(sequence, 0, num_tokens) == num_tokens,
            )
        total = sequence.num_tokens
        start = sequence.num_computed
        stop = self._prefixes.end_chunk(sequence.prefix, min(total, start + batch.budget))
        stop = self._cover(sequence, start, stop)
        if stop <= start:
            return False
        assert sequence.slot is not None
        chunk = PromptChunk(
            slot=sequence.slot,
            start=start,
            tokens=sequence.token_slice(start, stop),
            pages=tuple(sequence.pages),
            sample=stop == total,
            begin=not sequence.begun,
            sampling=sequence.sampling,
            seed=sequence.seed,
            prompt_len=sequence.prompt_len,
            history=None if sequence.begun else sequence.token_slice(0, total),
            replay_from=max(0, sequence.prompt_len - self._keep_tokens) if self._keep_tokens else 0,
        )
        batch.chunks.append(chunk)
        load = self._prefixes.begin_load(sequence.prefix, chunk.slot, chunk.pages)
        if load is not None:
            batch.loads.append(load)
        store = self._prefixes.begin_store(sequence.prefix, stop, chunk.slot, chunk.pages)
        if store is not None:
            batch.stores.append(store)
        batch.budget -= stop - start
        self.counts.prompt_tokens += stop - start
        sequence.num_computed = stop
        sequence.begun = True
        if not sequence.reported:
            sequence.reported = True
            batch.started.append(sequence)
        if chunk.sample:
            sequence.in_flight = 1
            batch.waiting.append((sequence, sequence.epoch))
            self._waiting.remove(sequence)
            sequence.status = Status.RUNNING
            insort(self._running, sequence, key=lambda other: other.order)
        return True

    def _admit(self, sequence: Sequence) -> bool:
        """Give a sequence a slot, if it is likely to get through its prompt with the pages there are:
        what half-computed prompts still need is theirs."""
        victim: Sequence | None = None
        if not self._slots.num_free:
            victim = self._worst_below(sequence)
            if victim is None:
                return False
        promised = sum(
            self._pages_for(other.num_tokens) - len(other.pages)
            for other in self._waiting
            if other.slot is not None and other is not victim
        )
        below = sum(len(other.pages) for other in self._holders() if other.order > sequence.order)
        room = self._pages.num_free + below - promised
        spare = 1 if self._running else 0
        others = self._slots.num_used - (victim is not None)
        if others and room < self._pages_for(sequence.num_tokens) + spare:
            return False
        if victim is not None:  # not before: its work would be lost for nothing
            self._preempt(victim)
        sequence.slot = self._slots.take(1)[0]
        return True

    def _cover(self, sequence: Sequence, start: int, stop: int) -> int:
        """Get pages for positions up to `stop`; returns how far they reach (may be `start`)."""
        missing = self._pages_for(stop) - len(sequence.pages)
        while missing > self._pages.num_free:
            victim = self._worst_below(sequence)
            if victim is None:
                break
            self._preempt(victim)
        sequence.pages += self._pages.take(max(0, min(missing, self._pages.num_free)))
        return max(start, min(stop, len(sequence.pages) * self._page_tokens))

    def _plan_decodes(self) -> StepPlan | None:
        rows: list[DecodeRow] = []
        new_pages: list[tuple[int, int, int]] = []
        waiting: list[tuple[Sequence, int]] = []
        page_tokens = self._page_tokens
        for sequence in list(self._running):
            if not sequence.may_decode:
                continue
            position = sequence.num_computed
            if position >= len(sequence.pages) * page_tokens:
                if self._cover(sequence, position, position + 1) == position:
                    self._preempt(sequence)
                    continue
                assert sequence.slot is not None
                new_pages.append((sequence.slot, len(sequence.pages) - 1, sequence.pages[-1]))
            assert sequence.slot is not None
            rows.append(DecodeRow(sequence.slot, position))
            waiting.append((sequence, sequence.epoch))
            sequence.num_computed += 1
            sequence.in_flight += 1
        if not rows:
            return None
        plan = StepPlan(self._take_step(), decodes=tuple(rows), new_pages=tuple(new_pages))
        self._launched.append(_Launched(plan, waiting, []))
        self._decodes_since_prompt += 1
        self.counts.decode_steps += 1
        return plan

    def _take_step(self) -> int:
        self._next_step += 1
        return self._next_step

    # ---- results ------------------------------------------------------------------------------------

    def apply(self, result: StepResult) -> StepOutput:
        """Take in the tokens of the oldest launched step.

        Raises:
            ValueError: the result is of another step.
        """
        launched = self._launched.popleft()
        if launched.plan.step != result.step or len(launched.waiting) != len(result.tokens):
            raise ValueError(f"expected step {launched.plan.step}, got {result.step}")
        rows: list[TokenRow] = []
        tokens: list[int] = result.tokens.tolist()
        for i, (sequence, epoch) in enumerate(launched.waiting):
            if sequence.epoch != epoch:
                continue
            token = tokens[i]
            generated = sequence.append(token)
            finish = RUNNING
            if token in sequence.stop_tokens and generated > sequence.sampling.min_tokens:
                finish = FINISH_STOP
            elif generated >= sequence.sampling.max_tokens:
                finish = FINISH_LENGTH
            rows.append(TokenRow(sequence, token, finish, result.logprobs.get(i)))
            if finish != RUNNING:
                self._finish(sequence)
        self.counts.generated_tokens += len(rows)
        return StepOutput(result.step, rows, launched.started)

    # ---- resources ----------------------------------------------------------------------------------

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._page_tokens)

    def _worst_below(self, sequence: Sequence) -> Sequence | None:
        """The last in rank of those that hold something and come after `sequence`."""
        below = (other for other in self._holders() if other.order > sequence.order)
        return max(below, key=lambda other: other.order, default=None)

    def _holders(self) -> list[Sequence]:
        return [s for s in (*self._waiting, *self._running) if s.slot is not None]

    def _enqueue_prefix(self, sequence: Sequence) -> None:
        self._prefixes.enqueue(sequence.prefix, sequence.token_slice(0, sequence.num_tokens))

    def _preempt(self, sequence: Sequence) -> None:
        """Take everything from a sequence; it starts over from its tokens when there is room."""
        self._release(sequence)
        if sequence.status is Status.RUNNING:
            self._running.remove(sequence)
            sequence.status = Status.WAITING
            insort(self._waiting, sequence, key=lambda other: other.order)
        self._enqueue_prefix(sequence)
        self.counts.preemptions += 1

    def _finish(self, sequence: Sequence) -> None:
        (self._running if sequence.status is Status.RUNNING else self._waiting).remove(sequence)
        self._release(sequence)
        sequence.status = Status.FINISHED
        del self._sequences[sequence.key]

    def _release(self, sequence: Sequence) -> None:
        # A launched step may still write these pages. That is harmless: steps run in launch order, so
        # the next owner's step writes later.
        self._pages.give_back(sequence.pages)
        sequence.pages = []
        if sequence.slot is not None:
            self._slots.give_back([sequence.slot])
            sequence.slot = None
        sequence.num_computed = sequence.in_flight = 0
        sequence.begun = False
        self._prefixes.drop(sequence.prefix)
        sequence.epoch += 1

    def check_integrity(self) -> None:
        """Compare pools, queues and sequences with each other.

        Raises:
            AssertionError: something is lost, owned twice or in the wrong place.
        """
        live = [*self._waiting, *self._running]
        if {id(s) for s in live} != {id(s) for s in self._sequences.values()}:
            raise AssertionError("a sequence is in no queue, or in one without being known")
        if len(live) != len(self._sequences):
            raise AssertionError("a sequence is queued twice")
        self._pages.check_integrity(page for s in live for page in s.pages)
        self._slots.check_integrity(s.slot for s in live if s.slot is not None)
        for queue in (self._waiting, self._running):
            if [s.order for s in queue] != sorted(s.order for s in queue):
                raise AssertionError("a queue is out of order")
        for sequence in live:
            if self._pages_for(sequence.num_computed) > len(sequence.pages):
                raise AssertionError(f"{sequence.key} has computed more than its pages hold")
        for sequence in self._running:
            known = sequence.num_tokens + sequence.in_flight
            if sequence.slot is None or sequence.num_computed != known - 1:
                raise AssertionError(f"{sequence.key} runs with wrong counts")
        self._prefixes.check_integrity(
            [s.prefix for s in live if s.slot is None],
            [s.prefix for s in live if s.slot is not None],
        )
