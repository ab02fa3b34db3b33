"""Scheduler and torch engine together: greedy output equals transformers' `generate`, token for token,
batched and alone, with chunked prefill forced small, and with preemption forced by a pool too small."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen3Config

from tests.support.engines import open_engine
from tests.support.greedy_reference import greedy_reference
from tests.support.scheduled import Answers, run_scheduled
from transport.messages.generate import SamplingParams

PAGE_BYTES_SMOLLM2 = 30 * 2 * 3 * 64 * 4 * 128

TEXT = (
    "The lighthouse keeper climbed the stairs every evening, counting the steps as he went, and lit "
    "the lamp before the fog came in from the sea. "
)
PROMPTS = [
    "Hi", "The capital of France is", "def fibonacci(n):\n", "1 2 3 4 5", "Once upon a time",
    "Ingredients: flour, sugar,", "In 1969,", "Water boils at", "A B C D", "To be or not to be",
    "The quick brown fox", "SELECT name FROM", "Dear Sir or Madam,", "\n\n\n", "Ünïcödé テスト",
    TEXT, TEXT * 2, TEXT * 4 + "Then", TEXT * 5 + "One night", TEXT * 9 + "At last",
]  # fmt: skip
NEW_TOKENS = 16


def run(
    model_dir: Path,
    prompts: list[list[int]],
    *,
    max_num_seqs: int,
    chunk: int,
    pages: int,
    page_bytes: int,
    new_tokens: int = NEW_TOKENS,
    stagger: int = 0,
) -> Answers:
    """Greedy, over a pool of so many pages."""
    engine = open_engine(
        model_dir,
        max_model_len=pages * 128,
        max_num_seqs=max_num_seqs,
        kv_cache_gb=(pages * page_bytes + page_bytes // 2) / 1e9,
        max_batched_tokens=chunk,
        num_threads=torch.get_num_threads(),
    )
    with contextlib.closing(engine):
        assert engine.info.num_pages == pages
        greedy = SamplingParams(new_tokens, temperature=0.0, ignore_eos=True)
        return run_scheduled(engine, prompts, chunk=chunk, sampling=greedy, stagger=stagger)


@functools.cache
def smollm2_reference(model_dir: Path) -> tuple[list[list[int]], list[list[int]]]:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    return prompts, greedy_reference(model_dir, prompts, NEW_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("max_num_seqs", "chunk", "stagger"), [(20, 512, 0), (1, 512, 0), (8, 17, 0), (6, 512, 3)],
    ids=["batched", "alone", "small chunks", "joining midway"],
)  # fmt: skip
def test_smollm2_equals_generate_on_twenty_prompts(smollm2_dir, max_num_seqs, chunk, stagger):
    prompts, wanted = smollm2_reference(smollm2_dir)
    assert len({len(ids) for ids in prompts}) > 10
    answers = run(
        smollm2_dir, prompts, max_num_seqs=max_num_seqs, chunk=chunk, pages=64,
        page_bytes=PAGE_BYTES_SMOLLM2, stagger=stagger,
    )  # fmt: skip
    assert answers.tokens == wanted


def tiny_model(folder: Path, family: str) -> Path:
    torch.manual_seed(3)
    common = {
        "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_hidden_layers": 2, "max_position_embeddings": 2048,
        "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 16,
    }  # fmt: skip
    config = LlamaConfig(**common) if family == "llama" else Qwen3Config(**common)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("chunk", [13, 128, 1000])
def test_preemption_does_not_change_a_token(tmp_path, family, chunk):
    model_dir = tiny_model(tmp_path, family)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 199, size).tolist() for size in (5, 120, 127, 128, 129, 200, 300)]
    wanted = greedy_reference(model_dir, prompts, 140)
    page_bytes = 2 * 2 * 2 * 16 * 4 * 128
    answers = run(
        model_dir, prompts, max_num_seqs=7, chunk=chunk, pages=9, page_bytes=page_bytes,
        new_tokens=140,
    )  # fmt: skip
    assert answers.preemptions > 0, "the pool was large enough: nothing was tested"
    assert answers.tokens == wanted
