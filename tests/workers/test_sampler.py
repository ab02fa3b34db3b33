"""What a user relies on in sampling: limits hold, seeds repeat, penalties match their formulas."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engines import DirectUpload
from transport.messages.generate import SamplingParams
from workers.contract import PromptChunk
from workers.sampling.logit_processing import random_words
from workers.sampling.sampler import SampledTokens, Sampler

VOCAB = 40
EOS = 2
CPU = torch.device("cpu")


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 1, **changes})  # type: ignore[arg-type]


def begin(
    sampler: Sampler,
    slot: int,
    sampling: SamplingParams,
    seed: int = 0,
    prompt: Sequence[int] = (5,),
    generated: Sequence[int] = (),
) -> None:
    tokens = np.array([*prompt, *generated], np.int32)
    observe(
        sampler,
        PromptChunk(slot, 0, tokens, (0,), True, True, sampling, seed, len(prompt), tokens),
    )


def observe(sampler: Sampler, chunk: PromptChunk) -> None:
    """A prompt step that samples nothing."""
    sampler.sample(sampler.prepare([chunk], [], [], DirectUpload()), None)


def sample(
    sampler: Sampler, logits: torch.Tensor, slots: Sequence[int], positions: Sequence[int]
) -> SampledTokens:
    return sampler.sample(sampler.prepare([], slots, positions, DirectUpload()), logits)


def draws(logits: torch.Tensor, sampling: SamplingParams, count: int = 4000) -> np.ndarray:
    """Tokens that `count` different seeds draw from one row of logits."""
    sampler = Sampler(count, VOCAB, (EOS,), CPU)
    for slot in range(count):
        begin(sampler, slot, sampling, seed=slot * 7919 + 13)
    return sample(sampler, logits.expand(count, VOCAB), range(count), [1] * count).tokens.numpy()


def logits_row(seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def assert_distributed(tokens: np.ndarray, probabilities: np.ndarray) -> None:
    """Pearson's chi-square over tokens expected at least five times; the bound is far out in the
    tail (p < 1e-6 by the Wilson-Hilferty approximation), and the seeds are fixed."""
    counts = np.bincount(tokens, minlength=VOCAB)
    assert not counts[probabilities == 0].any()
    expected = probabilities * len(tokens)
    common = expected >= 5
    statistic = ((counts - expected)[common] ** 2 / expected[common]).sum()
    freedom = common.sum() - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 4.75 * np.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < bound


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_softmax_at_the_temperature(temperature: float) -> None:
    row = logits_row()
    tokens = draws(row, params(temperature=temperature))
    assert_distributed(tokens, (row / temperature).softmax(-1).double().numpy())


def test_the_tokens_of_one_answer_are_drawn_apart() -> None:
    row, count = logits_row(1), 4000
    sampler = Sampler(count, VOCAB, (EOS,), CPU)
    for slot in range(count):
        begin(sampler, slot, params(), seed=5)
    tokens = sample(sampler, row.expand(count, VOCAB), range(count), range(count)).tokens.numpy()
    assert_distributed(tokens, row.softmax(-1).double().numpy())


def reference_filter(
    probabilities: np.ndarray, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    order = np.argsort(-probabilities, kind="stable")
    kept = list(order[: top_k or None])
    mass, nucleus = 0.0, []
    for token in kept:
        if nucleus and mass >= top_p * probabilities[kept].sum():
            break
        nucleus.append(token)
        mass += probabilities[token]
    kept = [t for t in nucleus if probabilities[t] >= min_p * probabilities.max()]
    out = np.zeros_like(probabilities)
    out[kept] = probabilities[kept] / probabilities[kept].sum()
    return out


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(3, 1.0, 0.0), (0, 0.6, 0.0), (0, 1.0, 0.2), (8, 0.7, 0.0), (10, 0.9, 0.1), (0, 1e-6, 0.0)],
)
def test_filters_keep_and_renormalise_what_they_should(
    top_k: int, top_p: float, min_p: float
) -> None:
    row = logits_row(3)
    tokens = draws(row, params(top_k=top_k, top_p=top_p, min_p=min_p))
    wanted = reference_filter(row.softmax(-1).double().numpy(), top_k, top_p, min_p)
    assert set(tokens.tolist()) <= set(np.flatnonzero(wanted).tolist())
    if np.count_nonzero(wanted) > 1:
        assert_distributed(tokens, wanted)


def test_a_row_without_filters_is_not_touched_by_its_neighbours() -> None:
    logits = torch.stack([logits_row(i) for i in range(3)])
    lone = Sampler(3, VOCAB, (EOS,), CPU)
    begin(lone, 0, params(), seed=5)
    mixed = Sampler(3, VOCAB, (EOS,), CPU)
    begin(mixed, 2, params(), seed=5)
    begin(mixed, 0, params(top_k=2, top_p=0.3, min_p=0.5, repetition_penalty=1.5), seed=6)
    begin(mixed, 1, params(temperature=0.0, logit_bias=((7, 50.0),)), seed=7)
    for position in range(1, 60):
        want = sample(lone, logits[2:], [0], [position]).tokens.tolist()
        got = sample(mixed, logits, [0, 1, 2], [9, 9, position]).tokens.tolist()
        assert got[2] == want[0]
        assert got[1] == 7


def test_greedy_is_argmax_and_top_k_one_is_greedy() -> None:
    logits = torch.stack([logits_row(i) for i in range(4)])
    sampler = Sampler(4, VOCAB, (EOS,), CPU)
    for slot, sampling in enumerate(
        (params(temperature=0.0), params(top_k=1), params(temperature=3.0, top_k=1), params())
    ):
        begin(sampler, slot, sampling)
    tokens = sample(sampler, logits, range(4), range(4)).tokens
    assert tokens[:3].tolist() == logits[:3].argmax(-1).tolist()


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1))
def test_randomness_is_a_function_of_seed_and_position(seed: int, position: int) -> None:
    one = random_words(np.array([seed], np.uint64), np.array([position], np.int64))
    many = random_words(
        np.array([1, seed, 3], np.uint64), np.array([position + 1, position, 0], np.int64)
    )
    assert one[0] == many[1]


def test_neighbouring_seeds_and_positions_are_unrelated() -> None:
    """Words of a grid of seeds and positions are uniform and uncorrelated along both axes."""
    seeds, positions = np.meshgrid(np.arange(256), np.arange(256))
    words = random_words(seeds.ravel().astype(np.uint64), positions.ravel().astype(np.int64))
    grid = words.reshape(256, 256) / 2**32
    assert len(np.unique(words)) > 65000
    histogram = np.histogram(grid, bins=64, range=(0, 1))[0]
    assert np.abs(histogram - 1024).max() < 6 * 32
    for pairs in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1]), (grid, grid.T)):
        off = pairs[0] != pairs[1]
        assert abs(np.corrcoef(pairs[0][off], pairs[1][off])[0, 1]) < 0.02


@settings(deadline=None, max_examples=60)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
    generated=st.lists(st.integers(0, VOCAB - 1), max_size=8),
    steps=st.integers(1, 6),
    chunk=st.integers(1, 9),
    with_history=st.booleans(),
    repetition=st.floats(0.5, 2.0),
    frequency=st.floats(-2.0, 2.0),
    presence=st.floats(-2.0, 2.0),
    seed=st.integers(0, 99),
    level=st.sampled_from([0.0, -12.0]),
)
def test_penalties_match_a_naive_reference(
    prompt: list[int],
    generated: list[int],
    steps: int,
    chunk: int,
    with_history: bool,
    repetition: float,
    frequency: float,
    presence: float,
    seed: int,
    level: float,
) -> None:
    """Greedy under penalties, whether or not all logits are negative: from history given at once or
    tokens seen chunk by chunk, and in a slot that another sequence used before."""
    sampling = params(
        temperature=0.0,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
    )
    sampler = Sampler(3, VOCAB, (EOS,), CPU)
    begin(sampler, 1, sampling, prompt=range(20), generated=range(10))
    tokens = np.array([*prompt, *generated], np.int32)
    for start in range(0, len(tokens), chunk):
        part = PromptChunk(
            slot=1,
            start=start,
            tokens=tokens[start : start + chunk],
            pages=(0,),
            sample=start + chunk >= len(tokens),
            begin=start == 0,
            sampling=sampling,
            seed=0,
            prompt_len=len(prompt),
            history=tokens if start == 0 and with_history else None,
        )
        observe(sampler, part)
    seen = list(generated)
    for step in range(steps):
        row = logits_row(seed * 31 + step) + level
        want = row.double().numpy()
        for token in {*prompt, *seen}:
            want[token] = want[token] / repetition if want[token] > 0 else want[token] * repetition
        for token in set(seen):
            want[token] -= frequency * seen.count(token) + presence
        token = int(sample(sampler, row[None], [1], [len(prompt) + len(seen)]).tokens[0])
        assert want[token] == pytest.approx(want.max(), abs=1e-4)
        seen.append(token)


def test_logit_bias_forces_and_forbids() -> None:
    row = logits_row()
    best = int(row.argmax())
    assert set(draws(row, params(logit_bias=((9, 100.0),)), 200).tolist()) == {9}
    assert best not in draws(row, params(logit_bias=((best, -100.0),)), 2000)
    assert best in draws(row, params(), 200)


def test_min_tokens_bans_the_ends_until_reached() -> None:
    """With a prompt of 3 and min_tokens 2, the tokens at positions 3 and 4 may not end it."""
    row = logits_row()
    row[EOS], row[11] = 30.0, 29.0
    sampler = Sampler(1, VOCAB, (EOS,), CPU)
    begin(sampler, 0, params(temperature=0.0, min_tokens=2, stop_token_ids=(11,)), prompt=(1, 1, 1))
    ends = [int(sample(sampler, row[None], [0], [p]).tokens[0]) for p in (3, 4, 5)]
    assert ends[0] not in {EOS, 11} and ends[1] not in {EOS, 11}
    assert ends[2] == EOS


def test_logprobs_only_for_rows_that_ask() -> None:
    logits = torch.stack([logits_row(i) for i in range(3)])
    sampler = Sampler(3, VOCAB, (EOS,), CPU)
    begin(sampler, 0, params(temperature=0.0, logprobs=0))
    begin(sampler, 1, params(temperature=0.0))
    begin(sampler, 2, params(temperature=0.3, logprobs=4))
    sampled = sample(sampler, logits, [0, 1, 2], [1, 1, 1])
    found = sampled.host_logprobs()
    want = logits.log_softmax(-1)
    assert sorted(found) == [0, 2]
    assert len(found[0].top_ids) == 0
    assert found[0].chosen == pytest.approx(float(want[0].max()), abs=1e-5)
    assert found[2].top_ids.tolist() == want[2].topk(4).indices.tolist()
    assert found[2].chosen == pytest.approx(float(want[2, sampled.tokens[2]]), abs=1e-5)
