"""`--deterministic`: the bits of a sequence do not depend on what else runs or how it is cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from tests.support import engines
from transport.messages.generate import SamplingParams
from workers.contract import DecodeRow, ModelLoadError, PromptChunk, StepPlan
from workers.engine.engine import ModelEngine

SIZES = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 3, "max_position_embeddings": 1024, "head_dim": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "mistral_window": transformers.MistralConfig(**SIZES, sliding_window=40),
    "gemma2": transformers.Gemma2Config(**SIZES, sliding_window=40),
    "qwen3": transformers.Qwen3Config(**SIZES),
}
SAMPLING = SamplingParams(max_tokens=1, temperature=1.0, logprobs=5)


def open_engine(folder: Path, deterministic: bool) -> ModelEngine:
    return engines.open_engine(
        folder, max_model_len=512, num_threads=2, deterministic=deterministic
    )


@pytest.fixture(params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param], dtype=torch.float32)
    model.save_pretrained(tmp_path)
    return tmp_path


class Run:
    """One sequence in slot 0, others around it; notes what the engine says of slot 0."""

    def __init__(self, engine: ModelEngine) -> None:
        self.engine = engine
        self.steps = 0
        self.lengths: dict[int, int] = {}
        self.seen: list[tuple[int, bytes]] = []

    def step(self, *, chunks: list[PromptChunk] = (), decodes: list[int] = ()) -> None:
        self.steps += 1
        rows = tuple(DecodeRow(slot, self.lengths[slot]) for slot in decodes)
        plan = StepPlan(self.steps, prompts=tuple(chunks), decodes=rows)
        result = self.engine.launch(plan).collect()
        slots = [chunk.slot for chunk in chunks if chunk.sample] or list(decodes)
        for slot in decodes:
            self.lengths[slot] += 1
        if 0 in slots:
            at = slots.index(0)
            found = result.logprobs[at]
            bits = np.float32(found.chosen).tobytes() + found.top_logprobs.tobytes()
            self.seen.append((int(result.tokens[at]), bits))

    def chunk(self, slot: int, tokens: list[int], start: int, end: int) -> PromptChunk:
        end = min(end, len(tokens))
        self.lengths[slot] = end
        return PromptChunk(
            slot=slot, start=start, tokens=np.array(tokens[start:end], np.int32),
            pages=tuple(range(4 * slot, 4 * slot + 4)), sample=end == len(tokens), begin=start == 0,
            sampling=SAMPLING, seed=slot, prompt_len=len(tokens), history=np.array(tokens, np.int32),
        )  # fmt: skip


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(3, 160, length).tolist()


def alone(engine: ModelEngine, tokens: list[int], output: int) -> list[tuple[int, bytes]]:
    run = Run(engine)
    run.step(chunks=[run.chunk(0, tokens, 0, len(tokens))])
    for _ in range(output):
        run.step(decodes=[0])
    return run.seen


def in_chunks(engine: ModelEngine, tokens: list[int], output: int) -> list[tuple[int, bytes]]:
    """Most steps sample nothing."""
    run = Run(engine)
    for start in range(0, len(tokens), 45):
        run.step(chunks=[run.chunk(0, tokens, start, start + 45)])
    for _ in range(output):
        run.step(decodes=[0])
    return run.seen


def in_company(engine: ModelEngine, tokens: list[int], output: int) -> list[tuple[int, bytes]]:
    run = Run(engine)
    run.step(chunks=[run.chunk(1, prompt(77), 0, 99), run.chunk(0, tokens, 0, 37)])
    run.step(chunks=[run.chunk(0, tokens, 37, 101), run.chunk(2, prompt(5), 0, 9)])
    run.step(chunks=[run.chunk(3, prompt(130), 0, 130), run.chunk(0, tokens, 101, 999)])
    for turn in range(output):
        run.step(decodes=[[0], [2, 0], [1, 3, 0, 2]][turn % 3])
    return run.seen


def test_logprobs_are_equal_bit_by_bit_alone_in_company_and_in_chunks(checkpoint: Path) -> None:
    engine = open_engine(checkpoint, deterministic=True)
    tokens = prompt(170)
    wanted = alone(engine, tokens, 9)
    assert in_company(engine, tokens, 9) == wanted
    assert in_chunks(engine, tokens, 9) == wanted
    engine.close()


def test_tokens_are_those_of_the_ordinary_way(checkpoint: Path) -> None:
    outputs = []
    for deterministic in (False, True):
        engine = open_engine(checkpoint, deterministic)
        outputs.append([token for token, _ in alone(engine, prompt(170), 9)])
        engine.close()
    assert outputs[0] == outputs[1]


def test_experts_are_refused_by_name(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="experts of MixtralForCausalLM"):
        open_engine(tmp_path, deterministic=True)
