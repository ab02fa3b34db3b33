"""transformers' own `generate`: the tokens that greedy decoding must give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

LEAST_GAP = 2e-4
"""Between the two best logits of each step. Processors, thread counts and batch shapes move float32
logits by some 1e-5: a closer choice may fall either way, and the comparison parts there."""
LEAST_ROUTER_GAP = 1e-5
"""Between the last expert that is chosen and the first that is not. Routers sit between the layers, where
the same noise is some 1e-6."""


def greedy_reference(
    model_dir: Path,
    prompts: Sequence[Sequence[int]],
    count: int,
    drafts: Sequence[Sequence[int]] | None = None,
) -> list[list[int]]:
    """The `count` tokens that follow each prompt; end tokens end nothing.

    Args:
        model_dir: of the model, which is run in float32.
        prompts: run one by one.
        count: of new tokens.
        drafts: guesses at the answers. One pass over a prompt and a draft shows whether each token is the
            best one, as `generate` takes it; only if not is `generate` run. The result is the same without.

    Raises:
        AssertionError: a choice is nearer than `LEAST_GAP`, or one of experts than `LEAST_ROUTER_GAP`: take
            other prompts or weights.
    """
    # Eager: some versions of transformers drop soft caps in their faster attention functions.
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager"
    )
    model.generation_config.eos_token_id = None
    for name, module in model.named_modules():
        if type(module).__name__.endswith("Router"):
            module.register_forward_hook(_check_router(name))
    guesses = drafts or [[]] * len(prompts)
    return [
        _answer(model, list(prompt), list(guess), count)
        for prompt, guess in zip(prompts, guesses, strict=True)
    ]


@torch.inference_mode()
def _answer(model: PreTrainedModel, prompt: list[int], guess: list[int], count: int) -> list[int]:
    if len(guess) == count:
        logits = model(torch.tensor([prompt + guess[:-1]]), logits_to_keep=count).logits[0]
        if logits.argmax(-1).tolist() == guess:
            _check_gap(logits, prompt)
            return guess
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False,
        pad_token_id=0, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    _check_gap(torch.cat(out.logits), prompt)
    tokens: list[int] = out.sequences[0, len(prompt) :].tolist()
    return tokens


def _check_gap(logits: Tensor, prompt: list[int]) -> None:
    best, second = logits.topk(2).values.unbind(-1)
    gap = (best - second).min().item()
    assert gap > LEAST_GAP, f"two tokens are only {gap:.1e} apart after {prompt[:5]}…"


def _check_router(name: str) -> Callable[[nn.Module, object, tuple[Tensor, ...]], None]:
    def check(router: nn.Module, _: object, output: tuple[Tensor, ...]) -> None:
        chosen = router.top_k
        assert isinstance(chosen, int)
        ranked = output[0].topk(chosen + 1).values
        gap = (ranked[:, -2] - ranked[:, -1]).min().item()
        assert gap > LEAST_ROUTER_GAP, f"two experts of {name} are only {gap:.1e} apart"

    return check
