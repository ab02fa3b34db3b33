"""Prompt steps: which chunks of which prompts go into one, within a budget of tokens."""

from __future__ import annotations

from collections.abc import Iterable

from hicache.manager.null import Reuse
from hicache.manager.step_copies import PrefixLoad, PrefixStore
from workers.contract import PromptChunk, StepPlan
from workers.scheduling.block_manager import BlockManager
from workers.scheduling.sequence import Sequence
from workers.scheduling.sequence_queue import SequenceQueue
from workers.scheduling.step import StepRow


class Prefill:
    """Fills prompt steps and plans those that are committed.

    Filling admits sequences, takes their pages (which may preempt others) and pins their prefix hits. All of
    that stands whether or not the step is committed. Only the prefix manager hears of chunks as they are
    filled, so that one prompt of a step can wait for another. It hears again if they are dropped.
    """

    def __init__(
        self, blocks: BlockManager, prefixes: Reuse, max_batched_tokens: int, keep_tokens: int
    ) -> None:
        self._blocks = blocks
        self._prefixes = prefixes
        self._max_batched_tokens = max_batched_tokens
        self._keep_tokens = keep_tokens

    def fill(self, waiting: SequenceQueue, decodes: bool) -> tuple[StepRow, ...]:
        """Fill the next chunks of waiting sequences, in the queue's order.

        Args:
            waiting: sequences whose prompt is not fully computed.
            decodes: whether any sequence decodes already and needs pages for that.
        """
        rows: list[StepRow] = []
        budget = self._max_batched_tokens
        for sequence in waiting:
            if budget <= 0 or sequence.paused:  # and so are all that follow
                break
            if sequence.slot is None:
                if self._prefixes.should_wait(sequence.prefix):
                    continue
                if not self._blocks.can_admit(sequence, spare=int(decodes)):
                    break
                self._admit(sequence)
            row = self._next_chunk(sequence, budget)
            if row is None:
                break
            rows.append(row)
            budget -= row.stop - row.start
            decodes = decodes or row.stop == sequence.num_tokens
        return tuple(rows)

    def _admit(self, sequence: Sequence) -> None:
        self._blocks.admit(sequence)
        sequence.num_computed = self._prefixes.start(
            sequence.prefix,
            lambda num_tokens: self._blocks.cover(sequence, num_tokens) == num_tokens,
        )

    def _next_chunk(self, sequence: Sequence, budget: int) -> StepRow | None:
        start = sequence.num_computed
        stop = min(sequence.num_tokens, start + budget)
        stop = self._blocks.cover(sequence, self._prefixes.end_chunk(sequence.prefix, stop))
        if stop <= start:
            return None
        self._prefixes.advance(sequence.prefix, stop)
        return StepRow(sequence, sequence.epoch, start, stop)

    def drop(self, rows: Iterable[StepRow]) -> None:
        for row in rows:
            self._prefixes.advance(row.sequence.prefix, row.start)

    def commit(self, step: int, rows: tuple[StepRow, ...]) -> StepPlan:
        """Plan a filled step. Its chunks count as computed from now on."""
        chunks = tuple(
            prompt_chunk(row.sequence, row.start, row.stop, self._keep_tokens) for row in rows
        )
        loads: list[PrefixLoad] = []
        stores: list[PrefixStore] = []
        for row, chunk in zip(rows, chunks, strict=True):
            ticket = row.sequence.prefix
            load = self._prefixes.begin_load(ticket, chunk.slot, chunk.pages)
            store = self._prefixes.begin_store(ticket, chunk.slot, chunk.pages)
            loads += [load] if load is not None else []
            stores += [store] if store is not None else []
            row.sequence.num_computed = row.stop
            row.sequence.engine_pages = len(chunk.pages)
        return StepPlan(step, prompts=chunks, loads=tuple(loads), stores=tuple(stores))


def prompt_chunk(sequence: Sequence, start: int, stop: int, keep_tokens: int) -> PromptChunk:
    """Positions start .. stop-1 of a sequence that has a slot and the pages for them.

    `keep_tokens` is as in `CacheLayout`.
    """
    assert sequence.slot is not None
    begins = not sequence.engine_pages
    return PromptChunk(
        slot=sequence.slot,
        start=start,
        tokens=sequence.token_slice(start, stop),
        pages=tuple(sequence.pages),
        sample=stop == sequence.num_tokens,
        begin=begins,
        sampling=sequence.sampling,
        seed=sequence.seed,
        prompt_len=sequence.prompt_len,
        history=sequence.token_slice(0, sequence.num_tokens) if begins else None,
        replay_from=max(0, sequence.prompt_len - keep_tokens) if keep_tokens else 0,
    )
