"""States cut out of a slot and continued elsewhere, as a prefix cache does."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.engines import DirectUpload, batch_tensors
from workers.attention.batch import LogitRow, Segment
from workers.contract import DecodeRow, StepPlan
from workers.models.deepseek_v41.engram.hashing import BORDER
from workers.models.deepseek_v41.steps.step import StepBuilder

KEEP = 24


@pytest.fixture
def driver(make_driver):
    return make_driver(keep_tokens=KEEP, stores_prefixes=True)


@pytest.fixture
def ids(golden):
    return golden("v41_tiny", "golden")["p300.input_ids"].tolist()


def cut_state(driver, slot, position):
    state = np.zeros(driver.engine.info.layout.stored_state_bytes, np.uint8)
    driver.engine.device_cache().states.store_state(slot, position, state)
    return state


def load_state(driver, slot, state, position):
    driver.engine.device_cache().states.load_state(slot, position, state)


def copy_pages(driver, source, target, count):
    pages = driver.caches.pages
    for block in range(count):
        pages[target.pages[block]] = pages[source.pages[block]]


@pytest.mark.parametrize("chunk", [1000, 100])
@pytest.mark.parametrize("position", [128, 256])
def test_a_prefix_hit_gives_the_numbers_of_a_cold_run(driver, golden, ids, position, chunk):
    """The first owner only shares the prefix; both anchors are cut after its whole prompt."""
    owner = driver.prompt([*ids[:position], 7, 8, 9, *ids[40:60]], slot=0)
    with torch.inference_mode():
        driver.prefill(owner, chunk)
        state = cut_state(driver, 0, position)
        driver.caches.states[1] = 77  # whoever had the slot before
        hit = driver.prompt(ids, slot=1)
        copy_pages(driver, owner, hit, position // 128)
        load_state(driver, 1, state, position)
        logits = driver.prefill(hit, chunk, start=position)
        driver.check_golden(golden("v41_tiny", "golden_replay"), "p300.keep24", hit, logits)


def test_both_anchors_of_a_prompt_can_be_cut(driver, ids):
    """floor128(L) for a longer next turn, floor128(L - keep) for the same prompt again."""
    for length in (256, 270, 279, 280, 299):
        prompt = driver.prompt(ids[:length])
        driver.prefill(prompt)
        for anchor in {length // 128 * 128, (length - KEEP) // 128 * 128}:
            cut_state(driver, 0, anchor)
    with pytest.raises(ValueError, match="no state at 0 in it"):
        cut_state(driver, 0, 0)
    with pytest.raises(ValueError, match="no page border"):
        cut_state(driver, 0, 200)
    with pytest.raises(ValueError, match="bytes here"):
        load_state(driver, 0, np.zeros(3, np.uint8), 128)


def test_a_state_survives_the_round_trip_through_another_slot(driver, ids):
    driver.prefill(driver.prompt(ids[:256]))
    state = cut_state(driver, 0, 256)
    load_state(driver, 2, state, 256)
    driver.engine.model._lengths[2] = 256
    assert np.array_equal(cut_state(driver, 2, 256), state)
    assert state.any()


def test_without_bounded_replay_a_hit_is_exact_too(make_driver, golden, ids):
    driver = make_driver(stores_prefixes=True)
    owner, hit = driver.prompt(ids, slot=0), driver.prompt(ids, slot=1)
    driver.prefill(owner)
    with torch.inference_mode():
        copy_pages(driver, owner, hit, 2)
    load_state(driver, 1, cut_state(driver, 0, 256), 256)
    logits = driver.prefill(hit, start=256)
    expected = golden("v41_tiny", "golden")["p300.logits_last16"]
    torch.testing.assert_close(logits[-16:], expected, atol=1e-4, rtol=0)


def test_lost_windows_are_replayed_from_the_embeddings(driver, golden, ids):
    """A hit of 256 tokens without a state: the encoder starts a window early and writes no entries of
    the prefix; what it yields is known from the golden file, and is not the exact result."""
    cold = driver.prompt(ids, slot=0)
    caches, config, engram = driver.caches, driver.network.config, driver.engram
    with torch.inference_mode():
        driver.prefill(cold)
        caches.states.zero_()
        begin = 256 - config.sliding_window
        engram._tails[0] = BORDER
        engram.begin(0, cold.chunk(0, 300).tokens, begin)
        segment = Segment(0, 0, begin, 300 - begin, replay_from=276)
        inputs = StepBuilder(config, caches.layout, batch_invariant=False).prepare(
            [segment],
            [LogitRow(0, p) for p in range(284, 300)],
            engram.prompts([(0, begin, cold.chunk(begin, 300).tokens)]),
            DirectUpload(),
            window_from=[begin],
            store_from=[256],
        )
        table = torch.tensor([cold.pages], dtype=torch.int32)
        tensors = batch_tensors([segment], torch.tensor(ids[begin:]), table)
        logits = driver.network(inputs.step(tensors), caches)
    assert len(logits) == 16
    driver.check_golden(golden("v41_tiny", "golden_replay"), "p300.hit256.keep24", cold, logits)


def test_a_sequence_that_arrives_to_decode_goes_on(driver, golden, ids):
    """Pages and state are there already: only the tables, the look-back and the token are told anew."""
    prompt = driver.prompt(ids, slot=0)
    with torch.inference_mode():
        driver.prefill(prompt)
        driver.engram._tails.fill_(BORDER)
    expected = golden("v41_tiny", "golden_replay")
    first, second = expected["p300.keep24.greedy"].tolist()[:2]
    known = replace(prompt, ids=[*prompt.ids, first])
    arrival = known.chunk(300, 301, begin=True)
    plan = StepPlan(0, decodes=(DecodeRow(0, 300),), arrivals=(arrival,))
    assert driver.engine.launch(plan).collect().tokens.tolist() == [second]
