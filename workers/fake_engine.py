"""A deterministic engine without a model, for protocol and scheduler tests and pipeline benchmarks.

Not a language model: it exists to check and to measure everything around one. In checking mode each
token is a hash of all tokens before it, read back through the block table from the page pool: a wrong
page, position or stale block table changes the output. In fast mode a token costs next to nothing.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from dataclasses import dataclass

import numpy as np

from workers.engine import (
    CacheLayout,
    DecodeRow,
    EngineInfo,
    PromptChunk,
    StepPlan,
    StepResult,
    TokenArray,
    TokenLogprobs,
)

PAGE_TOKENS = 128


def fake_next_token(tokens: TokenArray, vocab_size: int) -> int:
    """The token that the checking fake puts after `tokens`."""
    return zlib.crc32(np.ascontiguousarray(tokens, dtype="<i4").tobytes()) % vocab_size


@dataclass(frozen=True)
class FakeEngineSettings:
    """Shape and speed of a fake engine."""

    vocab_size: int
    num_pages: int
    max_num_seqs: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    page_tokens: int = PAGE_TOKENS
    pipeline_depth: int = 0
    checking: bool = True
    step_seconds: float = 0.0


class FakeEngine:
    """Implements `workers.engine.Engine` over a page pool that holds token ids."""

    def __init__(self, settings: FakeEngineSettings) -> None:
        self._settings = settings
        self._pool = np.full((settings.num_pages, settings.page_tokens), -1, dtype=np.int32)
        self._tables: list[list[int]] = [[] for _ in range(settings.max_num_seqs)]
        self._last = np.zeros(settings.max_num_seqs, dtype=np.int32)
        self._wanted_logprobs = [-1] * settings.max_num_seqs
        self._results: deque[StepResult] = deque()
        self._pause = threading.Event()
        self._info = EngineInfo(
            layout=CacheLayout(
                settings.page_tokens, settings.page_tokens * 4, (), fingerprint="fake"
            ),
            num_pages=settings.num_pages,
            max_num_seqs=settings.max_num_seqs,
            max_model_len=settings.max_model_len,
            vocab_size=settings.vocab_size,
            eos_token_ids=settings.eos_token_ids,
            pipeline_depth=settings.pipeline_depth,
            device="fake",
        )

    @property
    def info(self) -> EngineInfo:
        """What this engine offers."""
        return self._info

    def launch(self, plan: StepPlan) -> None:
        """Compute the step at once; `collect` hands it out."""
        for slot, block, page in plan.new_pages:
            if len(self._tables[slot]) != block:
                raise ValueError(f"slot {slot} grows at block {block}, has {self._tables[slot]}")
            self._tables[slot].append(page)
        sampled = [self._run_chunk(chunk) for chunk in plan.prompts]
        tokens = [token for token in sampled if token is not None]
        slots = [chunk.slot for chunk in plan.prompts if chunk.sample]
        if plan.decodes:
            tokens = self._run_decodes(plan.decodes)
            slots = [row.slot for row in plan.decodes]
        logprobs = {
            index: self._logprobs(token, self._wanted_logprobs[slot])
            for index, (token, slot) in enumerate(zip(tokens, slots, strict=True))
            if self._wanted_logprobs[slot] >= 0
        }
        self._results.append(StepResult(plan.step, np.asarray(tokens, dtype=np.int32), logprobs))

    def collect(self) -> StepResult:
        """The oldest step's tokens, after the configured step time."""
        if self._settings.step_seconds:
            self._pause.wait(self._settings.step_seconds)
        return self._results.popleft()

    def close(self) -> None:
        """Nothing to free. Idempotent."""
        self._pause.set()

    def _run_chunk(self, chunk: PromptChunk) -> int | None:
        self._tables[chunk.slot] = list(chunk.pages)
        if chunk.begin:
            self._wanted_logprobs[chunk.slot] = chunk.sampling.logprobs
        for offset, token in enumerate(chunk.tokens if self._settings.checking else ()):
            self._write(chunk.slot, chunk.start + offset, int(token))
        if not chunk.sample:
            return None
        end = chunk.start + len(chunk.tokens)
        token = self._next(chunk.slot, end)
        self._last[chunk.slot] = token
        return token

    def _run_decodes(self, rows: tuple[DecodeRow, ...]) -> list[int]:
        if not self._settings.checking:
            return [self._next(row.slot, row.position + 1) for row in rows]
        tokens = []
        for row in rows:
            self._write(row.slot, row.position, int(self._last[row.slot]))
            token = self._next(row.slot, row.position + 1)
            self._last[row.slot] = token
            tokens.append(token)
        return tokens

    def _logprobs(self, token: int, count: int) -> TokenLogprobs:
        """The chosen token is certain, the ids after it are ever less likely."""
        ids = (token + np.arange(count, dtype=np.int32)) % self._settings.vocab_size
        return TokenLogprobs(0.0, ids, -np.arange(count, dtype=np.float32))

    def _write(self, slot: int, position: int, token: int) -> None:
        block, offset = divmod(position, self._settings.page_tokens)
        self._pool[self._tables[slot][block], offset] = token

    def _next(self, slot: int, length: int) -> int:
        vocab = self._settings.vocab_size
        if not self._settings.checking:
            return (slot * 31 + length * 7) % vocab
        rows = self._pool[self._tables[slot]].reshape(-1)[:length]
        return fake_next_token(rows, vocab)
