"""Engines over the tiny models, driven plan by plan, and their golden files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support.engines import open_engine
from transport.messages.generate import SamplingParams
from workers.contract import DecodeRow, PromptChunk, StepPlan
from workers.engine.engine import ModelEngine
from workers.models.deepseek_v41.model.served import ServedDeepseekV41

DATA = Path(__file__).parents[2] / "data"
TOLERANCE = 1e-4
"""Between float32 logits and golden ones; measured are 1.2e-5 to 3.3e-5."""
GREEDY = SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True)


def open_model(model: str, **changes) -> ModelEngine:
    return open_engine(DATA / model, **{"max_model_len": 512, "kv_dtype": "float32", **changes})


@dataclass(frozen=True)
class Prompt:
    """Tokens of one sequence and where they are."""

    slot: int
    ids: list[int]
    pages: tuple[int, ...]
    replay_from: int = 0

    def chunk(self, start: int, end: int, *, begin: bool | None = None) -> PromptChunk:
        return PromptChunk(
            slot=self.slot,
            start=start,
            tokens=np.asarray(self.ids[start:end], np.int32),
            pages=self.pages,
            sample=end == len(self.ids),
            begin=start == 0 if begin is None else begin,
            sampling=GREEDY,
            seed=0,
            prompt_len=len(self.ids),
            history=np.asarray(self.ids, np.int32),
            replay_from=self.replay_from,
        )


class Driver:
    """An engine whose logits a test can see. Sequence s has its own pages, in no particular order."""

    def __init__(self, engine: ModelEngine) -> None:
        self.engine = engine
        model = engine.model
        assert isinstance(model, ServedDeepseekV41)
        self.network, self.caches, self.engram = model.network, model.caches, model.engram
        self.keep_tokens = engine.info.layout.keep_tokens

    def prompt(self, ids, slot: int = 0) -> Prompt:
        ids = [int(i) for i in ids]
        first = slot * 4
        replay_from = max(0, len(ids) - self.keep_tokens) if self.keep_tokens else 0
        return Prompt(slot, ids, (first + 2, first, first + 3, first + 1), replay_from)

    def prefill(self, prompt: Prompt, chunk: int = 1000, start: int = 0) -> torch.Tensor:
        """Logits of the rows that the decoder layers run on, in order."""
        return torch.cat(
            [
                self.step([prompt.chunk(at, min(at + chunk, len(prompt.ids)), begin=at == start)])
                for at in range(start, len(prompt.ids), chunk)
            ]
        )

    def step(self, chunks: list[PromptChunk]) -> torch.Tensor:
        return self.engine.logits(StepPlan(0, prompts=tuple(chunks)))

    def decode(self, tokens: dict[int, tuple[int, int]]) -> torch.Tensor:
        """One step; by slot the token and its position."""
        for slot, (token, _) in tokens.items():
            self.engine.force_token(slot, token)
        rows = tuple(DecodeRow(slot, position) for slot, (_, position) in tokens.items())
        return self.engine.logits(StepPlan(0, decodes=rows))

    def follow(self, prompt: Prompt, last: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        """Logits [n, V] that each of the n tokens was chosen from, after a prefill that ended with
        `last`. The tokens are fed whatever the logits say: near ties fall differently on other
        processors, and free-running comparisons part there."""
        logits = [last]
        for position, token in enumerate(tokens[:-1], len(prompt.ids)):
            logits.append(self.decode({prompt.slot: (token, position)})[0])
        return torch.stack(logits)

    def check_golden(
        self,
        golden: dict[str, torch.Tensor],
        key: str,
        prompt: Prompt,
        logits: torch.Tensor,
        steps: int = 32,
        tolerance: float = TOLERANCE,
    ) -> None:
        """The prompt's last rows, then decode steps, against the golden values under `key`."""
        rows, tokens = golden[f"{key}.logits_last16"], golden[f"{key}.greedy"][:steps].tolist()
        torch.testing.assert_close(logits[-16:].cpu(), rows, atol=tolerance, rtol=0)
        followed = self.follow(prompt, logits[-1], tokens).cpu()
        wanted = golden[f"{key}.decode_logits"][:steps]
        torch.testing.assert_close(followed, wanted, atol=tolerance, rtol=0)
        assert followed.argmax(-1).tolist() == tokens

    def continue_greedily(self, prompt: Prompt, last: torch.Tensor, count: int = 32):
        """Tokens and the logits that each was taken from, after a prefill that ended with `last`."""
        tokens, logits = [], []
        for position in range(len(prompt.ids), len(prompt.ids) + count):
            tokens.append(int(last.argmax()))
            logits.append(last)
            (last,) = self.decode({prompt.slot: (tokens[-1], position)})
        return tokens, torch.stack(logits)


@pytest.fixture(scope="module")
def make_driver():
    """Loads an engine over one of the tiny models; closed after the module's tests."""
    made: dict[object, Driver] = {}

    def make(model: str = "v41_tiny", **changes) -> Driver:
        key = (model, tuple(sorted(changes.items())))
        if key not in made:
            made[key] = Driver(open_model(model, **changes))
        return made[key]

    yield make
    for driver in made.values():
        driver.engine.close()


@pytest.fixture
def new_driver():
    """The same for one test, which may spoil it."""
    made: list[Driver] = []

    def make(model: str = "v41_tiny", **changes) -> Driver:
        made.append(Driver(open_model(model, **changes)))
        return made[-1]

    yield make
    for driver in made:
        driver.engine.close()


@pytest.fixture(scope="session")
def golden():
    """Golden files by model and name."""
    return lambda model, name: load_file(DATA / model / f"{name}.safetensors")
