"""Two workers answer as the model alone does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import AutoTokenizer

from tests.support.greedy_reference import greedy_reference
from tests.support.waiting import eventually

NEW_TOKENS = 16
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "1 2 3 4 5",
    "Once upon a time there was a",
    "Water boils at",
    "The lighthouse keeper climbed the stairs every evening, counting the steps. " * 12,
    "She opened the old book and read: " * 18,
    "Ingredients: flour, sugar, butter, eggs. Method:",
]


@pytest.mark.slow
def test_greedy_tokens_equal_those_of_generate(serve, smollm2_dir):
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    wanted = greedy_reference(smollm2_dir, prompts, NEW_TOKENS)
    options = dict(dtype="float32", dp=2, max_batched_tokens=64, routing="least-loaded")
    with serve(smollm2_dir, **options) as server:
        server.ready()

        def ask(text: str):
            body = {
                "prompt": text, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True,
                "logprobs": 0,
            }  # fmt: skip
            return server.post("/v1/completions", body).json

        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            answers = list(pool.map(ask, PROMPTS))
        for ids, tokens, answer in zip(prompts, wanted, answers, strict=True):
            choice = answer["choices"][0]
            assert answer["usage"]["prompt_tokens"] == len(ids)
            assert choice["logprobs"]["tokens"] == [tokenizer.decode([token]) for token in tokens]
            assert choice["text"] == tokenizer.decode(tokens)

        def decoded(rank: str) -> bool:
            return server.metric("decode_tokens_computed_total", rank=rank) >= 2 * NEW_TOKENS

        def prompt_steps() -> bool:
            steps = server.metric("engine_steps_total", kind="prompt")
            return steps >= sum(map(len, prompts)) / 64

        # Each worker tells what it has counted in its own time.
        eventually(lambda: decoded("0") and decoded("1"), 60, "both have worked")
        eventually(prompt_steps, 60, "there were as many prompt steps as chunks")
        assert max(map(len, prompts)) > 2 * 64, "no prompt was cut into chunks"
