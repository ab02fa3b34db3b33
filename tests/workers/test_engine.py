"""The engine against transformers' own `generate`: greedy tokens must be equal in float32,
whatever else is in the batch and however the prompt is cut. Plans are made by hand here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hicache.layout import CacheLayout
from tests.support import engines
from tests.support.families import CONFIGS, DEVICES, make_checkpoint, make_prompt
from tests.support.greedy_reference import greedy_reference
from transport.messages.generate import SamplingParams
from workers.contract import (
    DecodeRow,
    EngineError,
    ModelLoadError,
    PromptChunk,
    StepPlan,
    StepResult,
)
from workers.engine.engine import ModelEngine
from workers.models.hf import model as hf_model
from workers.models.served_model import LoadObserver


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = make_checkpoint(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


def open_engine(model_dir: Path, accelerator: str = "cpu", **changes: object) -> ModelEngine:
    values: dict[str, object] = {
        "accelerator": accelerator,
        "max_num_seqs": 5,
        "kv_cache_gb": None if accelerator == "cpu" else 0.1,
        "gpu_memory_utilization": 0.5,
    }
    return engines.open_engine(model_dir, **{**values, **changes})


class Driver:
    """Plays scheduler: slots are sequence numbers, pages are never reused."""

    def __init__(self, engine: ModelEngine, sampling: SamplingParams) -> None:
        self.engine = engine
        self.sampling = sampling
        # From the top, so that a page is never the one a zeroed table would name by accident.
        self.free = list(range(engine.info.num_pages))
        self.sequences: dict[int, list[int]] = {}
        self.pages: dict[int, list[int]] = {}
        self.prompt_len: dict[int, int] = {}
        self.steps = itertools.count()
        self.computed: dict[int, int] = {}

    def run(self, plan: StepPlan) -> StepResult:
        return self.engine.launch(plan).collect()

    def begin(self, slot: int, prompt: Sequence[int], chunk: int, seed: int = 0) -> None:
        self.sequences[slot] = list(prompt)
        self.pages[slot] = []
        self.prompt_len[slot] = len(prompt)
        for start in range(0, len(prompt), chunk):
            result = self.run(
                StepPlan(next(self.steps), prompts=(self.chunk(slot, start, chunk, seed),))
            )
            self.sequences[slot] += result.tokens.tolist()

    def chunk(self, slot: int, start: int, size: int, seed: int = 0) -> PromptChunk:
        tokens = self.sequences[slot]
        end = min(start + size, len(tokens))
        self._grow(slot, end)
        self.computed[slot] = end
        return PromptChunk(
            slot=slot,
            start=start,
            tokens=np.array(tokens[start:end], np.int32),
            pages=tuple(self.pages[slot]),
            sample=end == len(tokens),
            begin=start == 0,
            sampling=self.sampling,
            seed=seed,
            prompt_len=self.prompt_len[slot],
            history=np.array(tokens, np.int32) if start == 0 else None,
        )

    def _grow(self, slot: int, tokens: int) -> list[tuple[int, int, int]]:
        new = []
        while len(self.pages[slot]) * 128 < tokens:
            new.append((slot, len(self.pages[slot]), self.free[-1]))
            self.pages[slot].append(self.free.pop())
        return new

    def decode_plan(self, slots: Sequence[int]) -> StepPlan:
        rows, new = [], []
        for slot in slots:
            position = self.computed[slot]
            new += self._grow(slot, position + 1)
            rows.append(DecodeRow(slot, position))
            self.computed[slot] = position + 1
        return StepPlan(next(self.steps), decodes=tuple(rows), new_pages=tuple(new))

    def decode(self, slots: Sequence[int]) -> None:
        result = self.run(self.decode_plan(slots))
        for slot, token in zip(slots, result.tokens.tolist(), strict=True):
            self.sequences[slot].append(token)

    def output(self, slot: int) -> list[int]:
        return self.sequences[slot][self.prompt_len[slot] :]


GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


LENGTHS = (5, 127, 129, 300)


@pytest.mark.parametrize("accelerator", DEVICES)
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_equals_generate_alone_and_batched(
    name: str, accelerator: str, checkpoints: Callable[[str], Path]
) -> None:
    """Sequences of mixed lengths, cut into chunks of several sizes, join while others decode, and
    cross page borders; each yields what it yields alone."""
    folder = checkpoints(name)
    count = 9
    prompts = {slot: make_prompt(length) for slot, length in enumerate(LENGTHS)}
    engine = open_engine(folder, accelerator)
    batched = Driver(engine, GREEDY)
    for slot, chunk in zip(prompts, (1, 33, 128, 7), strict=True):
        batched.begin(slot, prompts[slot], chunk)
        batched.decode(range(slot + 1))
    while min(len(batched.output(slot)) for slot in prompts) < count:
        batched.decode(list(reversed(prompts)))
    for slot, prompt in prompts.items():
        want = greedy_reference(folder, [prompt], count)[0]
        assert batched.output(slot)[:count] == want, f"prompt of {len(prompt)} tokens"
    engine.close()


@pytest.mark.parametrize("accelerator", DEVICES)
@pytest.mark.parametrize("name", ["llama", "mistral_window", "gemma2"])
def test_many_prompts_in_one_step(
    name: str, accelerator: str, checkpoints: Callable[[str], Path]
) -> None:
    """One prompt step with whole prompts, a first and a later chunk; only some are sampled."""
    folder = checkpoints(name)
    engine = open_engine(folder, accelerator)
    driver = Driver(engine, GREEDY)
    for slot, length in enumerate((128, 60, 200)):
        driver.sequences[slot] = make_prompt(length)
        driver.pages[slot] = []
        driver.prompt_len[slot] = length
    first = driver.run(StepPlan(0, prompts=(driver.chunk(2, 0, 90), driver.chunk(0, 0, 999))))
    second = driver.run(StepPlan(1, prompts=(driver.chunk(1, 0, 999), driver.chunk(2, 90, 999))))
    assert first.tokens.tolist() == greedy_reference(folder, [driver.sequences[0]], 1)[0]
    assert second.tokens.tolist() == [
        greedy_reference(folder, [driver.sequences[slot]], 1)[0][0] for slot in (1, 2)
    ]
    engine.close()


@pytest.mark.parametrize("accelerator", DEVICES)
@pytest.mark.parametrize("name", ["llama", "mistral_window"])
def test_a_rounded_cache_gives_the_same_tokens_however_the_prompt_is_cut(
    name: str, accelerator: str, checkpoints: Callable[[str], Path]
) -> None:
    """A token sees the rounded KV of its neighbours also in the step that computes them."""
    folder = checkpoints(name)
    outputs = []
    for chunk in (300, 64, 7):
        engine = open_engine(folder, accelerator, kv_dtype="bf16")
        driver = Driver(engine, GREEDY)
        driver.begin(0, make_prompt(300), chunk)
        for _ in range(12):
            driver.decode([0])
        outputs.append(driver.output(0))
        assert {part.dtype for part in engine.info.layout.page_tensors} == {"bfloat16"}
        engine.close()
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize("accelerator", DEVICES)
def test_recompute_and_sharing_of_pages(
    accelerator: str, checkpoints: Callable[[str], Path]
) -> None:
    """A preempted sequence, recomputed in another slot with other pages, goes on as if nothing
    had happened; a prefix hit may start in the middle with pages that another slot filled."""
    folder = checkpoints("llama")
    engine = open_engine(folder, accelerator)
    driver = Driver(engine, GREEDY)
    prompt = make_prompt(140)
    driver.begin(0, prompt, 64)
    for _ in range(4):
        driver.decode([0])
    want = greedy_reference(folder, [prompt], 8)[0]
    driver.begin(3, prompt + driver.output(0), 50)
    driver.decode([3])
    assert driver.sequences[3][140:] == want[:7]

    driver.sequences[1] = list(prompt)
    driver.prompt_len[1] = len(prompt)
    driver.pages[1] = driver.pages[0][:1]
    hit = driver.chunk(1, 128, 99)
    result = driver.run(StepPlan(99, prompts=(hit_with_begin(hit, prompt),)))
    assert result.tokens.tolist() == want[:1]
    engine.close()


def hit_with_begin(chunk: PromptChunk, prompt: Sequence[int]) -> PromptChunk:
    return PromptChunk(
        chunk.slot,
        chunk.start,
        chunk.tokens,
        chunk.pages,
        True,
        True,
        chunk.sampling,
        chunk.seed,
        chunk.prompt_len,
        np.array(prompt, np.int32),
    )


@pytest.mark.parametrize("accelerator", DEVICES)
def test_sampling_and_penalties_survive_batching_and_recompute(
    accelerator: str, checkpoints: Callable[[str], Path]
) -> None:
    """The same seed gives the same tokens alone, in a batch, and after a recompute."""
    sampling = SamplingParams(
        max_tokens=1,
        temperature=1.3,
        top_p=0.95,
        top_k=80,
        min_p=0.01,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=0.2,
        logit_bias=((5, 4.0), (6, -100.0)),
        logprobs=2,
    )
    engine = open_engine(checkpoints("llama"), accelerator)
    alone = Driver(engine, sampling)
    alone.begin(2, make_prompt(30), 999, seed=11)
    for _ in range(12):
        alone.decode([2])
    batched = Driver(engine, sampling)
    for slot in (0, 1, 3):
        batched.begin(slot, make_prompt(30 + slot), 16, seed=11 + slot)
    for _ in range(5):
        batched.decode([3, 1, 0])
    assert batched.output(0) == alone.output(2)[:6]
    assert batched.output(0) != batched.output(1)
    batched.sequences[4] = list(batched.sequences[0])
    batched.prompt_len[4], batched.pages[4] = 30, []
    result = batched.run(StepPlan(0, prompts=(batched.chunk(4, 0, 999, seed=11),)))
    batched.sequences[4] += result.tokens.tolist()
    batched.decode([4, 1])
    assert batched.output(4) == alone.output(2)[:8]
    engine.close()


def test_logprobs_are_the_models_own(checkpoints: Callable[[str], Path]) -> None:
    """Bias and temperature change the token, not the reported distribution."""
    folder = checkpoints("llama")
    engine = open_engine(folder)
    prompt = make_prompt(20)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    want = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1).detach()
    sampling = SamplingParams(max_tokens=1, temperature=2.0, logit_bias=((17, 1000.0),), logprobs=3)
    driver = Driver(engine, sampling)
    driver.sequences[0], driver.pages[0], driver.prompt_len[0] = list(prompt), [], 20
    result = driver.run(StepPlan(0, prompts=(driver.chunk(0, 0, 99),)))
    entry = result.logprobs[0]
    assert result.tokens.tolist() == [17]
    assert entry.chosen == pytest.approx(float(want[17]), abs=1e-4)
    assert entry.top_ids.tolist() == want.topk(3).indices.tolist()
    np.testing.assert_allclose(entry.top_logprobs, want.topk(3).values, atol=1e-4)


def test_a_placeholder_step_yields_nothing_and_changes_nothing(
    checkpoints: Callable[[str], Path],
) -> None:
    engine = open_engine(checkpoints("llama"))
    driver = Driver(engine, GREEDY)
    driver.begin(0, make_prompt(5), 99)
    for _ in range(3):
        result = driver.run(StepPlan(77))
        assert (result.step, result.tokens.tolist(), result.logprobs) == (77, [], {})
        driver.decode([0])
    assert driver.output(0) == greedy_reference(checkpoints("llama"), [make_prompt(5)], 4)[0]
    engine.close()


def arrival(driver: Driver, slot: int) -> PromptChunk:
    """The sequence of `slot`, as if its prompt and first token came from elsewhere."""
    tokens = np.array(driver.sequences[slot], np.int32)
    return PromptChunk(
        slot=slot, start=len(tokens) - 1, tokens=tokens[-1:], pages=tuple(driver.pages[slot]),
        sample=True, begin=True, sampling=driver.sampling, seed=5,
        prompt_len=driver.prompt_len[slot], history=tokens,
    )  # fmt: skip


@pytest.mark.parametrize("length", [5, 127, 128, 200])
def test_a_sequence_whose_prompt_was_computed_elsewhere_goes_on_as_there(
    checkpoints: Callable[[str], Path], length: int
) -> None:
    """Here "elsewhere" is slot 0, whose pages are handed to slot 1; random draws and penalties go on too."""
    sampling = SamplingParams(max_tokens=1, temperature=1.0, repetition_penalty=1.3)
    engine = open_engine(checkpoints("llama"))
    driver = Driver(engine, sampling)
    driver.begin(0, make_prompt(length), 99, seed=5)
    driver.begin(2, make_prompt(9), 99)
    for table in (driver.sequences, driver.pages):
        table[1] = list(table[0])
    driver.computed[1], driver.prompt_len[1] = driver.computed[0], driver.prompt_len[0]
    for _ in range(4):
        driver.decode([0])
    expected = driver.output(0)
    first = driver.decode_plan([1, 2])
    chunk = arrival(driver, 1)
    result = driver.run(replace(first, arrivals=(chunk,), new_pages=()))
    driver.sequences[1].append(int(result.tokens[0]))
    for _ in range(3):
        driver.decode([1])
    assert driver.output(1) == expected
    engine.close()


def test_order_of_calls_is_checked(checkpoints: Callable[[str], Path]) -> None:
    engine = open_engine(checkpoints("llama"))
    driver = Driver(engine, GREEDY)
    driver.begin(0, make_prompt(5), 99)
    step = engine.launch(driver.decode_plan([0]))
    with pytest.raises(EngineError, match="collect one"):
        engine.launch(driver.decode_plan([0]))
    assert len(step.collect().tokens) == 1
    with pytest.raises(EngineError, match="collected already"):
        step.collect()
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.launch(driver.decode_plan([0]))


def test_a_layout_that_cannot_be_served_is_refused_before_the_weights_are_loaded(
    checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(layout: CacheLayout) -> None:
        raise ModelLoadError(f"{layout.page_bytes} bytes a page are too many.")

    monkeypatch.setattr(hf_model, "load_weights", None)  # not to be called
    with pytest.raises(ModelLoadError, match=r"[1-9][0-9]+ bytes a page"):
        open_engine(checkpoints("llama"), observer=LoadObserver(check_layout=refuse))


def test_cudnn_plans_no_attention(checkpoints: Callable[[str], Path]) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    open_engine(checkpoints("llama"), "cpu").close()
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "mistral_window"])
def test_launch_never_waits_for_the_gpu(name: str, checkpoints: Callable[[str], Path]) -> None:
    """Two decode steps run ahead of `collect`, with everything the sampler can do switched on."""
    sampling = SamplingParams(
        max_tokens=1,
        top_p=0.9,
        top_k=9,
        min_p=0.01,
        repetition_penalty=1.1,
        logprobs=2,
        logit_bias=((3, 1.0),),
        min_tokens=50,
    )
    folder = checkpoints(name)
    engine = open_engine(folder, "nvidia")
    driver = Driver(engine, sampling)
    for slot in range(2):
        driver.begin(slot, make_prompt(126), 50)
    driver.sequences[2], driver.pages[2], driver.prompt_len[2] = make_prompt(99), [], 99
    torch.cuda.set_sync_debug_mode("error")
    try:
        first = engine.launch(StepPlan(0, prompts=(driver.chunk(2, 0, 60),)))
        second = engine.launch(driver.decode_plan([0, 1]))
        first.collect()
        third = engine.launch(driver.decode_plan([1, 0]))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(second.collect().tokens) == 2
    assert len(third.collect().tokens) == 2
    engine.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_planned_pool_leaves_room_for_the_largest_step(
    checkpoints: Callable[[str], Path],
) -> None:
    """An unsized pool takes its share of the memory, and a full step still fits beside it."""
    engine = open_engine(checkpoints("llama"), "nvidia", kv_cache_gb=None, max_num_seqs=100_000)
    free, total = torch.cuda.mem_get_info()
    assert 0.3 * total < engine.model.pages.numel() < 0.55 * total
    assert free > 0.4 * total
    driver = Driver(engine, GREEDY)
    driver.begin(0, make_prompt(512), 512)
    assert len(driver.output(0)) == 1
    engine.close()
