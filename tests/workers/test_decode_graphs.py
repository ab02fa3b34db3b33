"""Padding of decode steps, and steps replayed as graphs."""

from __future__ import annotations

import pytest
import torch

from tests.support.engines import DirectUpload, open_engine, save_random_llama
from tests.support.scheduled import run_scheduled
from transport.messages.generate import SamplingParams
from workers.contract import DecodeRow, StepPlan
from workers.engine.decode_graphs import DecodeGraphs, padded_sizes
from workers.engine.slot_tables import SlotTables

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("most", [1, 2, 3, 24, 100, 256, 300, 511, 5000])
def test_every_batch_that_can_be_padded_fits(most: int) -> None:
    sizes = padded_sizes(most)
    assert sizes == sorted(set(sizes))
    covered = min(most, sizes[-1])
    assert covered == most or covered >= 512
    for rows in range(1, covered + 1):
        padded = min(size for size in sizes if size >= rows)
        assert padded - rows <= max(1, rows - 1)


def test_without_graphs_nothing_is_padded() -> None:
    assert DecodeGraphs().padded(1) == 0


def test_padding_rows_belong_to_nobody() -> None:
    """However often a padded step runs, they stay at position -1 and change no sequence."""
    tables = SlotTables(3, 2, torch.device("cpu"))
    tables.lengths[:3] = torch.tensor([5, 6, 7])
    tables.last_token[:3] = torch.tensor([50, 60, 70])
    for step in range(3):
        plan = StepPlan(step, decodes=(DecodeRow(2, 7 + step), DecodeRow(0, 5 + step)))
        update = tables.prepare(plan, DirectUpload(), padded_to=4)
        assert len(update.batch.segments) == 2
        rows = tables.apply(update)
        assert rows.positions.tolist() == [7 + step, 5 + step, -1, -1]
        assert rows.token_ids[:2].tolist() == [70, 50]
        assert len(rows.logit_rows) == 4
    assert tables.lengths[:3].tolist() == [8, 6, 10]


SAMPLING = {
    "greedy": SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=2),
    "plain greedy": SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
    "everything": SamplingParams(
        max_tokens=24, temperature=0.9, top_p=0.9, top_k=20, min_p=0.01, ignore_eos=True,
        repetition_penalty=1.1, frequency_penalty=0.1, logit_bias=((3, 1.0),),
    ),
}  # fmt: skip


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("stagger", [0, 3])
def test_graphs_change_no_token(tmp_path, monkeypatch, sampling: str, stagger: int) -> None:
    """In float32, padded and not, joined and left by other sequences, overlapped, and preempted."""
    folder = save_random_llama(tmp_path, 211)
    options = dict(accelerator="nvidia", max_num_seqs=7, max_model_len=512, kv_cache_gb=7.1e-4)
    prompts = [[(7 * i + 3 * k) % 200 for k in range(20 + 37 * i)] for i in range(7)]

    def answers() -> tuple[list[list[int]], int, bool]:
        engine = open_engine(folder, **options)
        with_graphs = engine._open().graphs.padded(1) > 0
        found = run_scheduled(
            engine, prompts, chunk=64, sampling=SAMPLING[sampling], stagger=stagger
        )
        engine.close()
        return found.tokens, found.preemptions, with_graphs

    fast, _, with_graphs = answers()
    monkeypatch.setattr(DecodeGraphs, "padded", lambda _graphs, _rows: 0)
    slow, _, without_graphs = answers()
    assert with_graphs and not without_graphs
    assert fast == slow
    assert len({token for tokens in fast for token in tokens}) > 20


@pytest.mark.gpu
@needs_gpu
def test_a_decode_step_allocates_no_page_locked_memory(tmp_path) -> None:
    """`cudaHostAlloc` waits for the device."""
    engine = open_engine(save_random_llama(tmp_path, 211), accelerator="nvidia", max_num_seqs=4)
    sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    run_scheduled(engine, [[1, 2, 3]], chunk=64, sampling=sampling)
    before = torch.cuda.host_memory_stats()["num_host_alloc"]
    run_scheduled(engine, [[1, 2, 3], [4, 5]], chunk=64, sampling=sampling)
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == before
    engine.close()
