"""The one interface between scheduler and model: `Engine`, its plans and its results.

No torch here: the scheduler, its tests and the fake engine import this module. An engine owns the
device: the page pool, per-slot tables (block table, length, last token) and the weights. The
scheduler owns the bookkeeping: which page and which slot belongs to which sequence.

A *slot* is a row of the engine's per-sequence tables (and, for models with states, of the state
pool), 0 <= slot < `EngineInfo.max_num_seqs`. A *page* is a row of the page pool that holds the KV
of `CacheLayout.page_tokens` consecutive tokens for all layers, 0 <= page < `num_pages`.

`launch(plan)` starts a step and returns it; `collect()` of that step waits for its tokens. Steps are
collected in the order of their launch, and at most `EngineInfo.pipeline_depth + 1` may be launched and
not collected; whoever launches them keeps the queue. With depth 1 the scheduler launches step n+1 before
it knows the tokens of step n: the engine takes the input token of a decode from its own per-slot table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hicache.copies.cache_copies import DeviceCache
from hicache.copies.runs import IndexArray
from hicache.layout import CacheLayout
from hicache.manager.step_copies import PrefixLoad, PrefixStore
from transport.framing import TokenArray
from transport.messages.generate import SamplingParams
from transport.model_files import ModelError

PAGE_TOKENS: Final = 128
"""Tokens per page of every served model. Scheduler tests use smaller pages."""


@dataclass(frozen=True)
class EngineInfo:
    layout: CacheLayout
    num_pages: int
    max_num_seqs: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    pipeline_depth: int
    """How many steps may run while the next one is planned: 0 on a CPU, 1 on a GPU."""
    device: str


@dataclass(frozen=True)
class PromptChunk:
    """Compute the KV of `tokens` at positions start .. start+len(tokens)-1 of the sequence in `slot`.

    `pages` is the sequence's whole block table so far and covers the chunk; the engine replaces the slot's
    block table with it. With `sample`, the chunk ends the prompt and the engine chooses the next token.
    With `begin`, this is the first chunk since the slot was given to the sequence: the engine resets the
    slot's sampling state from `sampling`, `prompt_len` and `generated`.
    """

    slot: int
    start: int
    tokens: TokenArray
    pages: tuple[int, ...]
    sample: bool
    begin: bool
    sampling: SamplingParams
    seed: int
    """Seed of this choice. The randomness of the token at position p is a function of (seed, p)."""
    prompt_len: int
    """Tokens of the sequence that came from the client."""
    history: TokenArray | None = None
    """With `begin`: all tokens known now, prompt then generated (for penalties, `min_tokens` and
    look-back before `start`, which is not 0 after a prefix hit)."""
    replay_from: int = 0
    """Bounded replay: first position that the decoder layers run on. It follows from the client's
    prompt alone, so that a sequence that is computed again, here or elsewhere, gets the same numbers."""


class DecodeRow(NamedTuple):
    """Compute one token: feed in the last sampled token of `slot`, at position `position`."""

    slot: int
    position: int
    """Position of the input token, = number of tokens whose KV is already in the pool."""


@dataclass(frozen=True)
class StepPlan:
    """A prompt step, a decode step or a placeholder.

    In a placeholder both lists are empty: it computes nothing and yields no tokens.
    """

    step: int
    prompts: tuple[PromptChunk, ...] = ()
    decodes: tuple[DecodeRow, ...] = ()
    arrivals: tuple[PromptChunk, ...] = ()
    """One for each sequence that decodes in this step for the first time because its prompt was computed
    elsewhere: nothing of these chunks is computed, but their slots are set up as after them. All begin;
    their one token, the input of the decode, has no KV yet."""
    new_pages: tuple[tuple[int, int, int], ...] = ()
    """(slot, block index, page) for decodes whose block table grew by one page before this step."""
    loads: tuple[PrefixLoad, ...] = ()
    """Run these in this order before the step is launched."""
    stores: tuple[PrefixStore, ...] = ()
    """Run these after this step's launch and before the next one's."""

    @property
    def is_prompt(self) -> bool:
        return bool(self.prompts)

    def written_pages(self) -> IndexArray:
        """Pages, int32, that the step may be the first to write to since their sequence got them.

        May include other pages of the same sequence. A decode continues in the page that it wrote to before.
        """
        pages = [page for chunk in (*self.prompts, *self.arrivals) for page in chunk.pages]
        pages += [page for _, _, page in self.new_pages]
        return np.array(pages, np.int32)


@dataclass(frozen=True)
class TokenLogprobs:
    """Logprobs of one sampled token under the model's own distribution (before temperature,
    penalties and bias)."""

    chosen: float
    top_ids: TokenArray
    top_logprobs: npt.NDArray[np.float32]


@dataclass(frozen=True)
class StepResult:
    """Tokens of one step in plan order: one per sampling `PromptChunk`, or one per `DecodeRow`."""

    step: int
    tokens: TokenArray
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """Keyed by index into `tokens`; only for slots whose sampling asks for logprobs."""


class LaunchedStep(Protocol):
    """A step under way. The launcher collects each step once, in launch order."""

    def is_done(self) -> bool:
        """Whether `collect` would return at once. Never waits."""
        ...

    def collect(self) -> StepResult:
        """Wait for the step and return its tokens.

        Raises:
            EngineError: the device failed and the engine must not be used any more, or the step was
                already collected.
        """
        ...


class Engine(Protocol):
    """A model on a device. Not thread-safe: one thread drives it."""

    @property
    def info(self) -> EngineInfo:
        """Constant for the engine's lifetime."""
        ...

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step. Returns before the device is done where `pipeline_depth` > 0.

        Raises:
            EngineError: the engine is closed, too many steps are running, or the device failed.
        """
        ...

    def device_cache(self) -> DeviceCache:
        """Return the pages and states, for whoever copies them.

        Raises:
            EngineError: the engine is closed.
        """
        ...

    def close(self) -> None:
        """Free the device's memory. Idempotent."""
        ...


class EngineError(RuntimeError):
    """The device or the model failed in a way that ends this engine."""


class ModelLoadError(ModelError):
    """What the files describe cannot be loaded or served by this worker."""
