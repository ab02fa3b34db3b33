"""The heaviest steps that an engine can be asked for, to measure their memory before serving."""

from __future__ import annotations

import numpy as np

from transport.messages.generate import SamplingParams
from workers.contract import DecodeRow, EngineInfo, PromptChunk, StepPlan
from workers.engine.memory_plan import pages_for


def heaviest_steps(info: EngineInfo, max_batched_tokens: int) -> tuple[StepPlan, ...]:
    """One long prompt, many short ones, and one decode of all slots, all at the longest context.

    Page 0 stands for every page, so one page is enough to run them.
    """
    sampling = SamplingParams(
        max_tokens=1,
        top_p=0.9,
        top_k=40,
        repetition_penalty=1.1,
        logprobs=0,
        logit_bias=((0, 0.0),),
    )
    length = info.max_model_len - 1
    pages = (0,) * pages_for(info.max_model_len, info.layout.page_tokens)
    keep = info.layout.keep_tokens

    def chunk(slot: int, start: int, tokens: int) -> PromptChunk:
        ids = np.zeros(tokens, np.int32)
        end = start + tokens
        return PromptChunk(
            slot,
            start,
            ids,
            pages,
            True,
            True,
            sampling,
            slot,
            end,
            history=ids[:0],
            replay_from=max(0, end - keep) if keep else 0,
        )

    tokens = min(max_batched_tokens, length)
    one_long = StepPlan(0, prompts=(chunk(0, length - tokens, tokens),))
    many = min(info.max_num_seqs, max_batched_tokens)
    each = max(1, min(length, max_batched_tokens // many))
    many_short = StepPlan(1, prompts=tuple(chunk(s, length - each, each) for s in range(many)))
    decode = StepPlan(2, decodes=tuple(DecodeRow(s, length) for s in range(many)))
    return one_long, many_short, decode
