"""What runs next on one rank: continuous batching over pages and slots, in plain Python.

A step is a prompt step (chunks of prompts, bounded by a token budget) or a decode step (one token for
every running sequence). Prompt steps run at once when nothing decodes; otherwise at most one per
`prefill_any_interval` decode steps, so that arriving prompts do not stop the streams.

Who goes first is `Sequence.order`: priority, then arrival, and those that are paused after all others.
Pages are handed out chunk by chunk. When they run out, the sequences last in order lose theirs and are
recomputed later (preemption), a paused one not before it is read again.

A step comes about in three calls, which `next_step` makes in one go: `next_kind` looks, `fill` finds
sequences, pages and slots, `commit` makes the progress. Ranks that run their steps together vote in
between: on the kind, and, since a prompt step may stay empty for want of pages, on whether any rank has
filled it. A rank with nothing to run commits a draft without rows, a placeholder.

Steps may be planned before the results of earlier ones are known (`pipeline_depth`): sequences then
count what is in flight, and results of a sequence that has meanwhile finished are dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from hicache.manager.null import NO_REUSE, Reuse
from transport.ids import RequestId
from transport.messages.generate import ALL_CHOICES, FINISH_LENGTH, FINISH_STOP, RUNNING
from workers.contract import EngineInfo, StepPlan, TokenLogprobs
from workers.scheduling.block_manager import BlockManager
from workers.scheduling.decode import Decode
from workers.scheduling.prefill import Prefill
from workers.scheduling.sequence import Sequence, Status
from workers.scheduling.sequence_queue import SequenceQueue
from workers.scheduling.step import InFlightStep, StepDraft, StepKind, StepOutput, TokenRow


@dataclass
class SchedulerCounts:
    """Totals since the start."""

    preemptions: int = 0
    prompt_steps: int = 0
    decode_steps: int = 0
    prompt_tokens: int = 0
    """Tokens computed by prompt steps, including recomputed ones."""
    generated_tokens: int = 0


class Scheduler:
    """Queues of one rank. Not thread-safe."""

    def __init__(
        self,
        engine: EngineInfo,
        max_batched_tokens: int,
        prefill_any_interval: int,
        prefixes: Reuse = NO_REUSE,
    ) -> None:
        layout = engine.layout
        self.blocks = BlockManager(
            engine.num_pages, engine.max_num_seqs, layout.page_tokens, self._preempt
        )
        self._prefill = Prefill(self.blocks, prefixes, max_batched_tokens, layout.keep_tokens)
        self._decode = Decode(self.blocks, self._preempt, layout.keep_tokens)
        self._prefixes = prefixes
        self._eos = frozenset(engine.eos_token_ids)
        self._interval = prefill_any_interval
        self._decodes_since_prompt = prefill_any_interval
        self._requests: dict[RequestId, dict[int, Sequence]] = {}
        """The choices that are here, by their index."""
        self._waiting = SequenceQueue()
        self._running = SequenceQueue()
        self._queues = (self._waiting, self._running, self.blocks.holders)
        self._in_flight: deque[InFlightStep] = deque()
        self._last_step = 0
        self.counts = SchedulerCounts()

    # ---- what others may know -----------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    # ---- coming and going ---------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence.

        Raises:
            ValueError: it can never fit into the pool, has no tokens, or its key is taken.
        """
        self._check_new(sequence)
        self._keep(sequence)
        self._enqueue(sequence)

    def reserve(self, sequence: Sequence) -> bool:
        """Give a slot and pages to a new sequence whose prompt is computed elsewhere.

        They are then in `sequence.slot` and `sequence.pages`. Returns False if there is no room now;
        nothing is kept then.

        Nothing displaces a reservation, and it may hold up others. Whoever makes it must end it, by `adopt`
        or `cancel`, once nothing writes to its pages any more.

        Raises:
            ValueError: as for `add`.
        """
        self._check_new(sequence)
        if not self.blocks.reserve(sequence, sequence.num_tokens, spare=bool(self._running)):
            return False
        sequence.status = Status.RESERVED
        self._keep(sequence)
        return True

    def adopt(
        self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None = None
    ) -> TokenRow:
        """Let a reserved sequence decode: the KV of its prompt has arrived.

        `token` was sampled where the prompt was computed. Returns the row for the client, which is not
        reported again. The sequence may end with it.

        Raises:
            ValueError: it is not reserved, or no longer.
        """
        if sequence.status is not Status.RESERVED:
            raise ValueError(f"sequence {sequence.key} is {sequence.status.value}, not reserved")
        sequence.num_computed = sequence.num_tokens
        sequence.in_flight = 1
        sequence.reported = True
        self._start_running(sequence)
        return self._append(sequence, token, logprobs)

    def _check_new(self, sequence: Sequence) -> None:
        longest = sequence.prompt_len + sequence.sampling.max_tokens
        if longest > self.blocks.max_tokens_of_one:
            raise ValueError(
                f"prompt and output need {longest} tokens, but this rank's pool holds "
                f"{self.blocks.max_tokens_of_one}"
            )
        if not len(sequence.prompt) or self._matching(*sequence.key):
            raise ValueError(f"sequence {sequence.key} is empty or already here")
        eos = frozenset[int]() if sequence.sampling.ignore_eos else self._eos
        sequence.stop_tokens = eos.union(sequence.sampling.stop_token_ids)

    def _keep(self, sequence: Sequence) -> None:
        request_id, index = sequence.key
        self._requests.setdefault(request_id, {})[index] = sequence

    def cancel(self, request_id: RequestId, index: int = ALL_CHOICES) -> list[Sequence]:
        """Drop one choice or all choices of a request, at any stage. Idempotent.

        Returns the sequences that were dropped.
        """
        dropped = self._matching(request_id, index)
        for sequence in dropped:
            self._finish(sequence)
        return dropped

    def cancel_all(self) -> None:
        for sequence in list(self._live()):
            self._finish(sequence)

    def throttle(self, request_id: RequestId, index: int, paused: bool) -> None:
        """Pause sequences that nobody reads, or resume them.

        A paused sequence keeps its slot and its pages until another one needs them.
        """
        for sequence in self._matching(request_id, index):
            queues = [queue for queue in self._queues if queue.remove(sequence)]
            sequence.paused = paused
            for queue in queues:
                queue.add(sequence)

    def _matching(self, request_id: RequestId, index: int) -> list[Sequence]:
        choices = self._requests.get(request_id, {})
        if index == ALL_CHOICES:
            return list(choices.values())
        return [choices[index]] if index in choices else []

    def _live(self) -> Iterator[Sequence]:
        for choices in self._requests.values():
            yield from choices.values()

    # ---- the next step ------------------------------------------------------------------------

    def next_step(self) -> InFlightStep | None:
        """Choose, fill and commit a step. Returns None if there is nothing to run now.

        The caller launches its plan, sets `launched`, and later calls `collect`.
        """
        draft = self.fill(self.next_kind())
        if draft.kind is StepKind.PROMPT and not draft.rows:
            draft = self.fill(StepKind.DECODE)
        return self.commit(draft) if draft.rows else None

    def next_kind(self) -> StepKind:
        """What this rank would run next. Changes nothing.

        A prompt step may turn out to be empty, for example when there are no pages for it.
        """
        can_decode = any(sequence.may_decode for sequence in self._running)
        first = self._waiting.first
        can_start = first is not None and not first.paused
        if can_start and (self._decodes_since_prompt >= self._interval or not can_decode):
            return StepKind.PROMPT
        return StepKind.DECODE if can_decode else StepKind.IDLE

    def fill(self, kind: StepKind) -> StepDraft:
        """Find sequences for a step of this kind, with slots and pages. There may be none.

        Pass the draft to `commit` or `drop` before any other call. Either way, sequences keep the slots and
        pages they got, and those that lost theirs start over.
        """
        match kind:
            case StepKind.PROMPT:
                decodes = bool(self._running)
                return StepDraft(kind, self._prefill.fill(self._waiting, decodes))
            case StepKind.DECODE:
                return StepDraft(kind, self._decode.fill(self._running))
            case StepKind.IDLE:
                return StepDraft(kind)

    def drop(self, draft: StepDraft) -> None:
        if draft.kind is StepKind.PROMPT:
            self._prefill.drop(draft.rows)

    def commit(self, draft: StepDraft) -> InFlightStep:
        """Record the progress of a draft, which must be launched next.

        A draft without rows is a placeholder and changes only the step number.

        Raises:
            ValueError: one of its sequences was preempted or has ended since it was filled.
        """
        if any(row.sequence.epoch != row.epoch for row in draft.rows):
            raise ValueError("a draft was kept while its sequences changed")
        self._last_step += 1
        if not draft.rows:
            step = InFlightStep(StepPlan(self._last_step), (), ())
        elif draft.kind is StepKind.PROMPT:
            step = self._commit_prompts(draft)
        else:
            plan = self._decode.commit(self._last_step, draft.rows)
            step = InFlightStep(plan, draft.rows, ())
            self._decodes_since_prompt += 1
            self.counts.decode_steps += 1
        self._in_flight.append(step)
        return step

    def _commit_prompts(self, draft: StepDraft) -> InFlightStep:
        plan = self._prefill.commit(self._last_step, draft.rows)
        started = tuple(row.sequence for row in draft.rows if not row.sequence.reported)
        for sequence in started:
            sequence.reported = True
        whole = tuple(row for row in draft.rows if row.stop == row.sequence.num_tokens)
        for row in whole:
            row.sequence.in_flight = 1
            self._waiting.remove(row.sequence)
            self._start_running(row.sequence)
        self._decodes_since_prompt = 0
        self.counts.prompt_steps += 1
        self.counts.prompt_tokens += sum(row.stop - row.start for row in draft.rows)
        return InFlightStep(plan, whole, started)

    # ---- results ------------------------------------------------------------------------------

    def collect(self) -> StepOutput:
        """Wait for the oldest step in flight and apply its tokens.

        Raises:
            EngineError: the device failed.
            ValueError: the result belongs to another step.
        """
        step = self._in_flight.popleft()
        assert step.launched is not None, "committed, but not launched"
        result = step.launched.collect()
        if step.plan.step != result.step or len(step.waiting) != len(result.tokens):
            raise ValueError(f"expected step {step.plan.step}, got {result.step}")
        tokens: list[int] = result.tokens.tolist()
        rows = [
            self._append(row.sequence, tokens[i], result.logprobs.get(i))
            for i, row in enumerate(step.waiting)
            if row.sequence.epoch == row.epoch
        ]
        self.counts.generated_tokens += len(rows)
        return StepOutput(step, rows)

    def _append(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> TokenRow:
        generated, sampling = sequence.append(token), sequence.sampling
        finish = RUNNING
        if token in sequence.stop_tokens and generated > sampling.min_tokens:
            finish = FINISH_STOP
        elif generated >= sampling.max_tokens:
            finish = FINISH_LENGTH
        if finish != RUNNING:
            self._finish(sequence)
        return TokenRow(sequence, token, finish, logprobs)

    # ---- queues -------------------------------------------------------------------------------

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        self._waiting.add(sequence)
        self._prefixes.enqueue(sequence.prefix, sequence.token_slice(0, sequence.num_tokens))

    def _start_running(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        self._running.add(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        self._leave_queue(sequence)
        self._release(sequence)
        self._enqueue(sequence)
        self.counts.preemptions += 1

    def _finish(self, sequence: Sequence) -> None:
        self._leave_queue(sequence)
        self._release(sequence)
        sequence.status = Status.FINISHED
        request_id, index = sequence.key
        choices = self._requests[request_id]
        del choices[index]
        if not choices:
            del self._requests[request_id]

    def _leave_queue(self, sequence: Sequence) -> None:
        if sequence.status is Status.WAITING:
            self._waiting.remove(sequence)
        elif sequence.status is Status.RUNNING:
            self._running.remove(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.blocks.release(sequence)
        self._prefixes.drop(sequence.prefix)
        sequence.num_computed = sequence.in_flight = sequence.engine_pages = 0
        sequence.epoch += 1

    def check_integrity(self) -> None:
        """Compare pools, queues and sequences with each other.

        Raises:
            AssertionError: something is lost, owned twice or in the wrong place.
        """
        live = list(self._live())
        for queue, status in ((self._waiting, Status.WAITING), (self._running, Status.RUNNING)):
            ordered = sorted((s for s in live if s.status is status), key=lambda s: s.order)
            if list(queue) != ordered:
                raise AssertionError(f"the queue of those {status.value} is not right")
        if any(sequence.status is Status.FINISHED for sequence in live):
            raise AssertionError("a sequence is kept that is over")
        self.blocks.check_integrity(live)
        for sequence in self._running:
            known = sequence.num_tokens + sequence.in_flight
            if sequence.slot is None or sequence.num_computed != known - 1:
                raise AssertionError(f"{sequence.key} runs with wrong counts")
        self._prefixes.check_integrity(
            [s.prefix for s in live if s.slot is None],
            [s.prefix for s in live if s.slot is not None],
        )
