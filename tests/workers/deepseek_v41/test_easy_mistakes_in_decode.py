"""Mistakes that only decode steps show, made on purpose after a correct prefill; see
`test_easy_mistakes.py`. Each step is given the golden token, whatever the logits before it were."""

from dataclasses import replace

import pytest
import torch

from workers.models.deepseek_v41.cache.pools import Caches
from workers.models.deepseek_v41.engram.hashing import BORDER
from workers.models.deepseek_v41.layout.row_layout import entries_per_page
from workers.models.deepseek_v41.model.model import Layer

LENGTH, STEPS = 37, 32


class DecodeRun:
    """Golden steps after the 37-token prompt; `before_step` is called with each position."""

    def __init__(self, driver, expected) -> None:
        self.driver = driver
        self.caches = driver.caches
        self.engram = driver.engram
        self._expected = expected
        self._last = driver.prefill(driver.prompt(expected[f"p{LENGTH}.input_ids"]))[-1]

    def worst_difference(self, before_step=lambda position: None) -> float:
        worst = 0.0
        for step in range(STEPS):
            token = int(self._expected[f"p{LENGTH}.greedy"][step])
            difference = self._last - self._expected[f"p{LENGTH}.decode_logits"][step]
            worst = max(worst, float(difference.abs().max()))
            with torch.inference_mode():
                before_step(LENGTH + step)
            (self._last,) = self.driver.decode({0: (token, LENGTH + step)})
        return worst


@pytest.fixture
def run(new_driver, golden):
    return DecodeRun(new_driver(), golden("v41_tiny", "golden"))


def test_no_mistake(run):
    assert run.worst_difference() < 1e-4


def test_engram_look_back_lost_between_steps(run):
    worst = run.worst_difference(lambda position: run.engram._tails.fill_(BORDER))
    assert worst == pytest.approx(5.34, abs=0.02)


def test_compressor_tail_lost_after_prefill(run):
    for layer in (2, 4):
        run.caches.tail(layer).zero_()
    assert run.worst_difference() > 2  # how much depends on what is there instead


def test_latent_rotated_at_the_last_token(run, monkeypatch):
    original = Layer.write_entries

    def write_entries(self, x, rows, step, *args):
        moved = {r: replace(e, positions=e.positions + r - 1) for r, e in step.entries.items()}
        original(self, x, rows, replace(step, entries=moved), *args)

    monkeypatch.setattr(Layer, "write_entries", write_entries)
    assert run.worst_difference() == pytest.approx(2.21, abs=0.02)


def test_index_keys_of_another_source_where_no_entry_is_completed(run, monkeypatch):
    """What the last source, layer 6, left behind a step earlier."""
    original = Caches.index_keys
    completes = True

    def index_keys(self, source, pages):
        if completes or source == 6:
            return original(self, source, pages)
        return original(self, 6, pages)[:, : pages.shape[1] * entries_per_page(2)]

    def before_step(position):
        nonlocal completes
        completes = position % 2 == 1

    monkeypatch.setattr(Caches, "index_keys", index_keys)
    assert run.worst_difference(before_step) == pytest.approx(4.09, abs=0.02)
