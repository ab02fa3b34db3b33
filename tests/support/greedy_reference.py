"""transformers' own `generate`: the tokens that greedy decoding must give."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

LEAST_GAP = 2e-4
"""Between the two best logits of each step. Processors, thread counts and batch shapes move float32
logits by some 1e-5: a closer choice may fall either way, and the comparison parts there."""


def greedy_reference(
    model_dir: Path, prompts: Sequence[Sequence[int]], count: int
) -> list[list[int]]:
    """The `count` tokens that follow each prompt; end tokens end nothing.

    Raises:
        AssertionError: a choice is nearer than `LEAST_GAP`: take other prompts or weights.
    """
    # Eager: some versions of transformers drop soft caps in their faster attention functions.
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager"
    )
    model.generation_config.eos_token_id = None
    answers = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False,
                pad_token_id=0, output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        best, second = torch.cat(out.logits).topk(2).values.unbind(-1)
        gap = (best - second).min().item()
        assert gap > LEAST_GAP, f"two tokens are only {gap:.1e} apart after {list(prompt)[:5]}…"
        answers.append(out.sequences[0, len(prompt) :].tolist())
    return answers
