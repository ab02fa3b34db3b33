"""Steps of an engine as a worker runs them: greedy, and the next one launched before one is collected."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import Final

import numpy as np

from daemon.errors import EXIT_USAGE, DeepInferError
from transport.messages.generate import SamplingParams
from workers.contract import DecodeRow, Engine, LaunchedStep, PromptChunk, StepPlan
from workers.engine.memory_plan import pages_for

_GREEDY: Final = SamplingParams(max_tokens=1, temperature=0.0)
_SEED: Final = 0


@dataclass(frozen=True)
class Timing:
    """Means of a step, in seconds."""

    seconds: float
    launch_seconds: float
    """On the host, until the step is launched."""


class Stepper:
    """Runs decode and prompt steps of one engine. Keys and values of contexts are whatever the pool holds:
    sequences are set up as if they had been computed elsewhere."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numbers = count()
        self._running: deque[LaunchedStep] = deque()
        self._launching = 0.0

    def check_decode(self, batch: int, context: int) -> None:
        """
        Raises:
            DeepInferError: the KV cache does not hold the sequences.
        """
        self._check(batch, context, f"A decode of {batch} sequences")

    def check_prefill(self, tokens: int) -> None:
        """
        Raises:
            DeepInferError: as above.
        """
        self._check(1, tokens, "A prefill")

    def decode(self, batch: int, first: int, warm: int, steps: int) -> Timing:
        """The time of `steps` decode steps of `batch` sequences, after `warm` others.

        The first of all has its input at position `first`, so that each sequence has `first` tokens in
        the cache by then.
        """
        info = self._engine.info
        pages = pages_for(first + warm + steps, info.layout.page_tokens)
        scattered = np.random.default_rng(_SEED).permutation(info.num_pages)
        tables = scattered[: batch * pages].reshape(batch, pages).tolist()
        tokens = np.arange(first + 1, dtype=np.int32) % info.vocab_size
        arrivals = tuple(
            PromptChunk(
                slot, first, tokens[first:], tuple(tables[slot]), False, True, _GREEDY, slot,
                len(tokens), tokens,
            )
            for slot in range(batch)
        )  # fmt: skip
        began = time.perf_counter()
        for step in range(warm + steps):
            if step == warm:
                self._collect_all()
                self._launching = 0.0
                began = time.perf_counter()
            self._launch(
                StepPlan(
                    next(self._numbers),
                    decodes=tuple(DecodeRow(slot, first + step) for slot in range(batch)),
                    arrivals=() if step else arrivals,
                )
            )
        self._collect_all()
        return Timing((time.perf_counter() - began) / steps, self._launching / steps)

    def prefill(self, tokens: int, warm: int, steps: int) -> Timing:
        """The time of a prompt of `tokens` tokens, from its launch to its first token."""
        info = self._engine.info
        ids = np.arange(tokens, dtype=np.int32) % info.vocab_size
        pages = tuple(range(pages_for(tokens, info.layout.page_tokens)))
        keep = info.layout.keep_tokens
        began = time.perf_counter()
        for step in range(warm + steps):
            if step == warm:
                self._launching = 0.0
                began = time.perf_counter()
            chunk = PromptChunk(
                0, 0, ids, pages, True, True, _GREEDY, 0, tokens, ids,
                replay_from=max(0, tokens - keep) if keep else 0,
            )  # fmt: skip
            self._launch(StepPlan(next(self._numbers), prompts=(chunk,)))
            self._collect_all()
        return Timing((time.perf_counter() - began) / steps, self._launching / steps)

    def _launch(self, plan: StepPlan) -> None:
        began = time.perf_counter()
        self._running.append(self._engine.launch(plan))
        self._launching += time.perf_counter() - began
        if len(self._running) > self._engine.info.pipeline_depth:
            self._running.popleft().collect()

    def _collect_all(self) -> None:
        while self._running:
            self._running.popleft().collect()

    def _check(self, batch: int, tokens: int, wanted: str) -> None:
        info = self._engine.info
        pages = batch * pages_for(tokens, info.layout.page_tokens)
        if tokens <= info.max_model_len and pages <= info.num_pages:
            return
        raise DeepInferError(
            f"{wanted} of {tokens:,} tokens takes {pages:,} pages of KV, but the engine has "
            f"{info.num_pages:,}: lower --batch, --context or --prefill, or free memory.",
            EXIT_USAGE,
        )
