"""Decode steps: one token for every sequence that may have one."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from workers.contract import DecodeRow, PromptChunk, StepPlan
from workers.scheduling.block_manager import BlockManager
from workers.scheduling.prefill import prompt_chunk
from workers.scheduling.sequence import Sequence
from workers.scheduling.sequence_queue import SequenceQueue
from workers.scheduling.step import StepRow


class Decode:
    """Fills decode steps and plans those that are committed.

    Filling takes the pages that are needed, which may preempt others. The pages stay taken whether or not
    the step is committed.
    """

    def __init__(
        self, blocks: BlockManager, preempt: Callable[[Sequence], None], keep_tokens: int
    ) -> None:
        self._blocks = blocks
        self._preempt = preempt
        self._keep_tokens = keep_tokens

    def fill(self, running: SequenceQueue) -> tuple[StepRow, ...]:
        rows: list[StepRow] = []
        for sequence in running:
            if not sequence.may_decode:
                continue
            position = sequence.num_computed
            has_page = position < len(sequence.pages) * self._blocks.page_tokens
            if not has_page and self._blocks.cover(sequence, position + 1) <= position:
                self._preempt(sequence)
                continue
            rows.append(StepRow(sequence, sequence.epoch, position, position + 1))
        return tuple(rows)

    def commit(self, step: int, rows: Iterable[StepRow]) -> StepPlan:
        """Plan a filled step. Its tokens are in flight from now on."""
        decodes: list[DecodeRow] = []
        new_pages: list[tuple[int, int, int]] = []
        arrivals: list[PromptChunk] = []
        for sequence, _, position, _ in rows:
            assert sequence.slot is not None
            decodes.append(DecodeRow(sequence.slot, position))
            if not sequence.engine_pages:
                end = sequence.num_tokens
                arrivals.append(prompt_chunk(sequence, position, end, self._keep_tokens))
            elif sequence.engine_pages < len(sequence.pages):
                new_pages.append((sequence.slot, len(sequence.pages) - 1, sequence.pages[-1]))
            sequence.engine_pages = len(sequence.pages)
            sequence.num_computed += 1
            sequence.in_flight += 1
        return StepPlan(
            step, decodes=tuple(decodes), new_pages=tuple(new_pages), arrivals=tuple(arrivals)
        )
