"""Scheduler and engine together: what a client gets does not depend on what else runs, on chunks or on
preemption."""

import numpy as np
import pytest
from msgspec.structs import replace

from transport.ids import ProcessName, RequestId
from transport.messages.generate import RUNNING, Generate, SamplingParams
from workers.contract import EngineError, PromptChunk, StepPlan
from workers.scheduling.scheduler import Scheduler
from workers.scheduling.sequence import Sequence

LENGTHS = (37, 130, 300)
LEAST_GAP = 3e-4
"""Between the two best logprobs of a greedy step: a closer choice may fall either way."""
GREEDY = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=6, temperature=1.0, top_k=50, seed=1, logprobs=0)


def run(engine, prompts, *, chunk, sampling=GREEDY, seeds=None):
    """Tokens and chosen logprobs of each prompt, and how often one was preempted."""
    scheduler = Scheduler(engine.info, chunk, prefill_any_interval=1)
    sequences = [
        Sequence(
            key=(RequestId(f"r{i:02}"), 0),
            frontend=ProcessName("frontend/0"),
            prompt=np.asarray(ids, np.int32),
            prompt_len=len(ids),
            generate=Generate(sampling),
            seed=i if seeds is None else seeds[i],
            arrival=float(i),
        )
        for i, ids in enumerate(prompts)
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    logprobs = {sequence.key: [] for sequence in sequences}
    unfinished = len(sequences)
    while unfinished:
        step = scheduler.next_step()
        assert step is not None
        step.launched = engine.launch(step.plan)
        for row in scheduler.collect().rows:
            unfinished -= row.finish != RUNNING
            if row.logprobs is not None:
                logprobs[row.sequence.key].append(row.logprobs.chosen)
                if sampling.temperature == 0 and sampling.logprobs >= 2:
                    best, second = row.logprobs.top_logprobs[:2]
                    assert best - second > LEAST_GAP, "take other prompts"
    scheduler.check_integrity()
    tokens = [sequence.generated for sequence in sequences]
    return tokens, [logprobs[s.key] for s in sequences], scheduler.counts.preemptions


@pytest.fixture
def prompts(golden):
    return [golden("v41_tiny", "golden")[f"p{n}.input_ids"].tolist() for n in LENGTHS]


@pytest.mark.parametrize("keep", [0, 24])
@pytest.mark.parametrize("chunk", [512, 50])
def test_greedy_tokens_of_a_batch(make_driver, golden, prompts, keep, chunk):
    driver = make_driver(keep_tokens=keep)
    tokens, _, _ = run(driver.engine, prompts, chunk=chunk)
    name, suffix = ("golden_replay", ".keep24") if keep else ("golden", "")
    expected = golden("v41_tiny", name)
    for length, got in zip(LENGTHS, tokens, strict=True):
        assert got == expected[f"p{length}{suffix}.greedy"].tolist()


@pytest.mark.parametrize("keep", [0, 24])
def test_preempted_and_recomputed(make_driver, golden, prompts, keep):
    """Five pages for sequences of 2, 2 and 3: someone has to give way while it decodes."""
    page = make_driver(keep_tokens=keep).engine.info.layout.page_bytes
    driver = make_driver(keep_tokens=keep, kv_cache_gb=5.5 * page / 1e9)
    assert driver.engine.info.num_pages == 5
    prompts = [prompts[1][:120], prompts[2][:250], prompts[1][:125], prompts[0]]
    some = replace(GREEDY, max_tokens=16, logprobs=2)
    together, logprobs, preemptions = run(driver.engine, prompts, chunk=64, sampling=some)
    assert preemptions > 0
    for ids, tokens, of_tokens in zip(prompts, together, logprobs, strict=True):
        alone, logprobs_alone, _ = run(driver.engine, [ids], chunk=512, sampling=some)
        assert tokens == alone[0]
        np.testing.assert_allclose(of_tokens, logprobs_alone[0], atol=1e-4, rtol=0)


def test_batch_invariant_results_do_not_differ_by_a_bit(make_driver, prompts):
    """Logprobs are compared without tolerance: alone, in a batch, and with other chunks."""
    engine = make_driver(deterministic=True, keep_tokens=24).engine
    seeds = [11, 12, 13]
    prompts = [prompts[0], prompts[1], prompts[2][:170]]
    together = run(engine, prompts, chunk=512, sampling=SEEDED, seeds=seeds)
    chunked = run(engine, prompts[::-1], chunk=45, sampling=SEEDED, seeds=seeds[::-1])
    assert chunked[0] == together[0][::-1]
    assert chunked[1] == together[1][::-1]
    for i, ids in enumerate(prompts):
        tokens, logprobs, _ = run(engine, [ids], chunk=100, sampling=SEEDED, seeds=[seeds[i]])
        assert tokens[0] == together[0][i]
        assert logprobs[0] == together[1][i]
    assert len(set(map(tuple, together[0]))) == 3


def test_batch_invariant_results_meet_the_golden_values(make_driver, golden, prompts):
    tokens, _, _ = run(make_driver(deterministic=True).engine, prompts[:2], chunk=64)
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
