"""Whether a prompt can be run, once its tokens are known."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from transport.framing import TokenArray
from transport.messages.generate import ModelInfo, PromptKind
from transport.messages.to_router import Submit


@dataclass(frozen=True)
class PromptProblem:
    """Why a prompt is answered with status 400."""

    code: str
    message: str
    param: str


def longest(model: ModelInfo) -> int:
    return min(model.max_model_len, model.pool_tokens)


def find_problem(kind: PromptKind, prompt: TokenArray, model: ModelInfo) -> PromptProblem | None:
    param = "messages" if kind == "chat" else "prompt"
    if not len(prompt):
        return PromptProblem("empty_prompt", "The prompt has no tokens.", param)
    if len(prompt) >= longest(model):
        message = (
            f"The prompt has {len(prompt)} tokens, but the model's maximum context length is "
            f"{longest(model)} tokens, prompt and answer together: shorten the prompt."
        )
        return PromptProblem("context_length_exceeded", message, param)
    # Also of a tokenizer, which may have more tokens than the model has rows: such an id, read from
    # the embeddings, ends a worker on a GPU.
    if not (prompt.min() >= 0 and prompt.max() < model.vocab_size):
        message = f"{param} has a token id outside of 0..{model.vocab_size - 1}."
        return PromptProblem("invalid_token", message, param)
    return None


def fit(message: Submit, prompt_len: int, model: ModelInfo) -> Submit:
    """The same with an output limit that fits behind the prompt."""
    generate, sampling = message.generate, message.generate.sampling
    limit = min(sampling.max_tokens, longest(model) - prompt_len)
    sampling = replace(sampling, max_tokens=limit, min_tokens=min(sampling.min_tokens, limit))
    return replace(message, generate=replace(generate, sampling=sampling))
