"""A deterministic engine without a model, for protocol and scheduler tests and pipeline benchmarks.

Not a language model: it exists to check and to measure everything around one. In checking mode each
token is a hash of all tokens before it, read back through the block table from the page pool, and, with
a window, of the last tokens as the slot's state has them: a wrong page, position, state or stale block
table changes the output. Chunks that do not mind `keep_tokens` are refused. In fast mode a token costs
next to nothing.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache.copies.cache_copies import DeviceCache
from hicache.copies.rows import HostRows, RowArray
from hicache.layout import CacheLayout
from transport.framing import TokenArray
from workers.contract import (
    PAGE_TOKENS,
    DecodeRow,
    EngineInfo,
    PromptChunk,
    StepPlan,
    StepResult,
    TokenLogprobs,
)


def fake_next_token(tokens: TokenArray, vocab_size: int, window: int = 0) -> int:
    recent = tokens[len(tokens) - min(window, len(tokens)) :]
    return _hash(tokens, recent) % vocab_size


def _hash(tokens: TokenArray, recent: TokenArray) -> int:
    seen = zlib.crc32(np.ascontiguousarray(tokens, dtype="<i4").tobytes())
    return zlib.crc32(np.ascontiguousarray(recent, dtype="<i4").tobytes(), seen)


@dataclass(frozen=True)
class FakeEngineSettings:
    vocab_size: int
    num_pages: int
    max_num_seqs: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    page_tokens: int = PAGE_TOKENS
    pipeline_depth: int = 0
    checking: bool = True
    step_seconds: float = 0.0
    window: int = 0
    """Tokens of a slot's sliding-window state; 0: no states."""
    keep_tokens: int = 0
    """As in `CacheLayout`."""


class FakeEngine:
    """Implements `workers.contract.Engine` over a page pool that holds token ids."""

    def __init__(self, settings: FakeEngineSettings) -> None:
        self._settings = settings
        self._pool = np.full((settings.num_pages, settings.page_tokens), -1, dtype=np.int32)
        # Two anchors of a prompt can be cut out of a ring of this size.
        ring = settings.window + settings.page_tokens + settings.keep_tokens
        self._rings = np.full((settings.max_num_seqs, ring), -1, dtype=np.int32)
        self._tables: list[list[int]] = [[] for _ in range(settings.max_num_seqs)]
        self._last = np.zeros(settings.max_num_seqs, dtype=np.int32)
        self._wanted_logprobs = [-1] * settings.max_num_seqs
        self._closed = threading.Event()
        self._info = EngineInfo(
            layout=CacheLayout(
                settings.page_tokens,
                settings.page_tokens * 4,
                (),
                state_bytes=self._rings.itemsize * ring if settings.window else 0,
                stored_state_bytes=self._rings.itemsize * settings.window,
                replay_tokens=max(1, settings.keep_tokens),
                keep_tokens=settings.keep_tokens,
                fingerprint="fake",
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
        return self._info

    def launch(self, plan: StepPlan) -> FakeStep:
        """Compute the step at once; `collect` hands it out after the configured step time."""
        for slot, block, page in plan.new_pages:
            if len(self._tables[slot]) != block:
                raise ValueError(f"slot {slot} grows at block {block}, has {self._tables[slot]}")
            self._tables[slot].append(page)
        for chunk in plan.arrivals:
            self._set_up(chunk)
            self._last[chunk.slot] = chunk.tokens[0]
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
        result = StepResult(plan.step, np.asarray(tokens, dtype=np.int32), logprobs)
        seconds = self._settings.step_seconds
        return FakeStep(result, time.monotonic() + seconds if seconds else 0.0, self._closed)

    def device_cache(self) -> DeviceCache:
        window = self._settings.window
        states = FakeStates(self._rings, window) if window else None
        return DeviceCache(HostRows.of(self._pool.view(np.uint8)), states)

    def close(self) -> None:
        """Steps under way count as done at once. Idempotent."""
        self._closed.set()

    def receive(self, slot: int, pages: Sequence[int], tokens: TokenArray) -> None:
        self._tables[slot] = list(pages)
        for position, token in enumerate(tokens.tolist()):
            self._write(slot, position, token)

    def _set_up(self, chunk: PromptChunk) -> None:
        self._tables[chunk.slot] = list(chunk.pages)
        if chunk.begin:
            self._wanted_logprobs[chunk.slot] = chunk.sampling.logprobs

    def _run_chunk(self, chunk: PromptChunk) -> int | None:
        replay_from = max(0, chunk.prompt_len - (self._settings.keep_tokens or chunk.prompt_len))
        if chunk.replay_from != replay_from:
            raise ValueError(f"rows are replayed from {chunk.replay_from}, not from {replay_from}")
        if chunk.begin and self._settings.keep_tokens and chunk.start > replay_from:
            raise ValueError(f"a hit of {chunk.start} tokens skips rows that are replayed")
        self._set_up(chunk)
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
        ids = (token + np.arange(count, dtype=np.int32)) % self._settings.vocab_size
        return TokenLogprobs(0.0, ids, -np.arange(count, dtype=np.float32))

    def _write(self, slot: int, position: int, token: int) -> None:
        block, offset = divmod(position, self._settings.page_tokens)
        self._pool[self._tables[slot][block], offset] = token
        self._rings[slot, position % self._rings.shape[1]] = token

    def _next(self, slot: int, length: int) -> int:
        vocab = self._settings.vocab_size
        if not self._settings.checking:
            return (slot * 31 + length * 7) % vocab
        rows = self._pool[self._tables[slot]].reshape(-1)[:length]
        ring = self._rings[slot]
        positions = np.arange(max(0, length - self._settings.window), length)
        return _hash(rows, ring[positions % len(ring)]) % vocab


@dataclass(frozen=True)
class FakeStep:
    """Implements `workers.contract.LaunchedStep`."""

    result: StepResult
    done_at: float
    """Time of the monotonic clock."""
    closed: threading.Event

    def is_done(self) -> bool:
        return self.closed.is_set() or time.monotonic() >= self.done_at

    def collect(self) -> StepResult:
        if self.done_at:
            self.closed.wait(max(0.0, self.done_at - time.monotonic()))
        return self.result


class FakeStates:
    """`StateCodec` of rings of tokens: a stored state is the window before its position."""

    def __init__(self, rings: TokenArray, window: int) -> None:
        self._rings = rings
        self._window = window

    def store_state(self, slot: int, position: int, host_state: RowArray) -> None:
        host_state.view(np.int32)[:] = self._rings[slot, self._places(position)]

    def load_state(self, slot: int, position: int, host_state: RowArray) -> None:
        self._rings[slot, self._places(position)] = host_state.view(np.int32)

    def _places(self, position: int) -> npt.NDArray[np.int64]:
        places: npt.NDArray[np.int64]
        places = np.arange(position - self._window, position) % self._rings.shape[1]
        return places
