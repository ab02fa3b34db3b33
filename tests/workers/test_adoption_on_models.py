"""A prompt computed by one engine and decoded by another: the tokens are those of the first one alone."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from tests.support.engines import open_engine, save_random_llama
from transport.ids import ProcessName, RequestId
from transport.messages.generate import RUNNING, Generate, SamplingParams
from workers.scheduling.scheduler import Scheduler
from workers.scheduling.sequence import Sequence, Status

VOCAB = 211
OUTPUT = 12
V41_TINY = Path(__file__).parents[1] / "data" / "v41_tiny"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_random_llama(tmp_path_factory.mktemp("llama"), VOCAB)


def sequence(name: str, prompt: list[int]) -> Sequence:
    sampling = SamplingParams(
        max_tokens=OUTPUT, temperature=0.8, ignore_eos=True, frequency_penalty=0.7, seed=5
    )
    return Sequence(
        key=(RequestId(name), 0), frontend=ProcessName("frontend/0"),
        prompt=np.asarray(prompt, np.int32), prompt_len=len(prompt),
        generate=Generate(sampling), seed=5,
    )  # fmt: skip


def run_step(engine, scheduler: Scheduler) -> list[Sequence]:
    """Returns those that have ended."""
    step = scheduler.next_step()
    assert step is not None
    step.launched = engine.launch(step.plan)
    return [row.sequence for row in scheduler.collect().rows if row.finish != RUNNING]


@pytest.mark.parametrize("model", ["llama", "deepseek_v41"])
def test_tokens_go_on_as_where_the_prompt_was_computed(model_dir, model):
    engines = [
        open_engine(
            model_dir if model == "llama" else V41_TINY, max_model_len=512, max_num_seqs=4,
            kv_cache_gb=0.003, max_batched_tokens=100, keep_tokens=24,
        )
        for _ in range(2)
    ]  # fmt: skip
    here, there = engines
    prompt = Random(3).choices(range(3, VOCAB), k=187)

    schedulers = [Scheduler(engine.info, 100, 1) for engine in engines]
    alone = sequence("alone", prompt)
    schedulers[0].add(alone)
    while not run_step(here, schedulers[0]):
        pass
    sent = sequence("sent", prompt)
    schedulers[0].add(sent)
    while not sent.generated:
        run_step(here, schedulers[0])

    other = sequence("other", prompt[:50])
    schedulers[1].add(other)
    run_step(there, schedulers[1])  # so that slots and pages are not the same
    adopted = sequence("adopted", prompt)
    assert schedulers[1].reserve(adopted)
    assert (adopted.slot, adopted.pages) != (sent.slot, sent.pages)
    with torch.inference_mode():
        there.model.pages[adopted.pages] = here.model.pages[sent.pages[: len(adopted.pages)]]
        if model == "deepseek_v41":
            there.model.caches.states[adopted.slot] = here.model.caches.states[sent.slot]
    schedulers[1].adopt(adopted, sent.generated[0])
    while adopted.status is not Status.FINISHED:
        run_step(there, schedulers[1])
    assert schedulers[1].counts.prompt_steps == 1
    assert adopted.generated == alone.generated
    for engine in engines:
        engine.close()
