"""Scheduler and engine together: what a client gets does not depend on what else runs, on chunks or on
preemption."""

import numpy as np
import pytest
from msgspec.structs import replace

from tests.support.scheduled import Answers, run_scheduled
from transport.messages.generate import SamplingParams
from workers.contract import EngineError, PromptChunk, StepPlan

LENGTHS = (37, 130, 300)
GREEDY = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=6, temperature=1.0, top_k=50, seed=1, logprobs=0)


def run(engine, prompts, *, chunk, sampling=GREEDY, seeds=None) -> Answers:
    return run_scheduled(engine, prompts, chunk=chunk, sampling=sampling, seeds=seeds)


@pytest.fixture
def prompts(golden):
    return [golden("v41_tiny", "golden")[f"p{n}.input_ids"].tolist() for n in LENGTHS]


@pytest.mark.parametrize("keep", [0, 24])
@pytest.mark.parametrize("chunk", [512, 50])
def test_greedy_tokens_of_a_batch(make_driver, golden, prompts, keep, chunk):
    driver = make_driver(keep_tokens=keep)
    tokens = run(driver.engine, prompts, chunk=chunk).tokens
    name, suffix = ("golden_replay", ".keep24") if keep else ("golden", "")
    expected = golden("v41_tiny", name)
    for length, got in zip(LENGTHS, tokens, strict=True):
        assert got == expected[f"p{length}{suffix}.greedy"].tolist()


@pytest.mark.parametrize("keep", [0, 24])
def test_preempted_and_recomputed(make_driver, golden, prompts, keep):
    """Five pages for sequences of 2, 2 and 3: someone has to give way while it decodes.

    Tokens would not tell whether the decoder layers were replayed on the right rows, logprobs do: in float32,
    batch shapes move them by 3.3e-5 at most (as they move golden logits), other rows by more than 1e-3."""
    page = make_driver(keep_tokens=keep).engine.info.layout.page_bytes
    driver = make_driver(keep_tokens=keep, kv_cache_gb=5.5 * page / 1e9)
    assert driver.engine.info.num_pages == 5
    prompts = [prompts[1][:120], prompts[2][:250], prompts[1][:125], prompts[0]]
    some = replace(GREEDY, max_tokens=16, logprobs=2)
    together = run(driver.engine, prompts, chunk=64, sampling=some)
    assert together.preemptions > 0 and together.recomputed > 0
    for ids, tokens, logprobs in zip(prompts, together.tokens, together.logprobs, strict=True):
        alone = run(driver.engine, [ids], chunk=512, sampling=some)
        assert tokens == alone.tokens[0]
        np.testing.assert_allclose(logprobs, alone.logprobs[0], atol=1e-4, rtol=0)


def test_batch_invariant_results_do_not_differ_by_a_bit(make_driver, prompts):
    """Logprobs are compared without tolerance: alone, in a batch, and with other chunks."""
    engine = make_driver(deterministic=True, keep_tokens=24).engine
    seeds = [11, 12, 13]
    prompts = [prompts[0], prompts[1], prompts[2][:170]]
    together = run(engine, prompts, chunk=512, sampling=SEEDED, seeds=seeds)
    chunked = run(engine, prompts[::-1], chunk=45, sampling=SEEDED, seeds=seeds[::-1])
    assert chunked.tokens == together.tokens[::-1]
    assert chunked.logprobs == together.logprobs[::-1]
    for i, ids in enumerate(prompts):
        alone = run(engine, [ids], chunk=100, sampling=SEEDED, seeds=[seeds[i]])
        assert alone.tokens[0] == together.tokens[i]
        assert alone.logprobs[0] == together.logprobs[i]
    assert len(set(map(tuple, together.tokens))) == 3


def test_batch_invariant_results_meet_the_golden_values(make_driver, golden, prompts):
    tokens = run(make_driver(deterministic=True).engine, prompts[:2], chunk=64).tokens
    expected = golden("v41_tiny", "golden")
    assert tokens == [expected[f"p{n}.greedy"].tolist() for n in LENGTHS[:2]]


def test_misuse_is_refused(make_driver):
    driver = make_driver(max_num_seqs=1)
    engine = driver.engine
    chunk = PromptChunk(0, 0, np.arange(3, dtype=np.int32), (0,), True, True, GREEDY, 0, 3)
    step = engine.launch(StepPlan(1, prompts=(chunk,)))
    with pytest.raises(EngineError, match="collect one before"):
        engine.launch(StepPlan(2, prompts=(chunk,)))
    assert step.collect().step == 1
    with pytest.raises(EngineError, match="collected already"):
        step.collect()
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.launch(StepPlan(3, prompts=(chunk,)))
