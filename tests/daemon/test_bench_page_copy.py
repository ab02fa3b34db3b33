"""`deepinfer bench page-copy`: what it copies, what it makes of the figures, and what it does without a
GPU. With one, `tests/daemon/test_bench_on_gpu.py` runs it."""

from __future__ import annotations

import contextlib
import sys
from random import Random
from unittest.mock import MagicMock

import msgspec
import numpy as np
import pytest
import torch
from rich.console import Console

from daemon.cli.bench.page_copy import command, gpu
from daemon.cli.bench.page_copy.cases import (
    all_cases,
    churned_prompts,
    fresh_prompts,
    scattered_rows,
)
from daemon.cli.bench.page_copy.report import (
    CopyFigures,
    Rates,
    Report,
    SlowdownFigures,
    judge,
    show,
)
from daemon.cli.main import main
from daemon.errors import DeepInferError
from hicache.copies.runs import merge_runs


@pytest.fixture(scope="module")
def cases():
    return all_cases()


def test_no_row_is_both_loaded_and_stored(cases):
    """Else copies in both directions at once would race."""
    for case in cases:
        for side, count in (("here", case.device_rows), ("there", case.host_rows)):
            rows = np.concatenate([getattr(case.load, side), getattr(case.store, side)])
            assert len(np.unique(rows)) == len(rows)
            assert rows.min() >= 0
            assert rows.max() < count
            assert rows.dtype == np.int32


def test_every_run_of_the_benchmark_copies_the_same_rows(cases):
    for first, again in zip(cases, all_cases(), strict=True):
        assert first.name == again.name
        for one, other in ((first.load, again.load), (first.store, again.store)):
            np.testing.assert_array_equal(one.here, other.here)
            np.testing.assert_array_equal(one.there, other.there)


def test_a_fresh_pool_gives_one_run_and_a_churned_one_many():
    fresh, churned = fresh_prompts(), churned_prompts(Random(1))
    assert len(fresh.load.here) == len(churned.load.here) == 32 * 1024 // 128
    assert len(merge_runs(*fresh.load).length) == len(merge_runs(*fresh.store).length) == 1
    assert len(merge_runs(*churned.load).length) > 4
    assert churned.mean_run_bytes() < fresh.mean_run_bytes() / 4


def test_scattered_rows_stay_single_and_within_bounds():
    case = scattered_rows(1 << 20, Random(2))
    assert len(case.load.here) * case.row_bytes == 512 << 20
    assert case.mean_run_bytes() < 1.1 * case.row_bytes


def copied(rates: Rates, method: str = "auto", case: str = "32K prompt, fresh") -> CopyFigures:
    return CopyFigures(case, method, 114_048, 114_048 * 256, rates, 0.2, 0.73)


def beside(
    percent: float, method: str = "auto", case: str = "32K prompt, fresh"
) -> SlowdownFigures:
    return SlowdownFigures(case, method, "up", percent, 50.0)


def test_goals_are_judged_by_what_auto_does_with_a_fresh_prompt():
    other = [copied(Rates(1, 1, 1), "batch"), copied(Rates(1, 1, 1), case="32K prompt, churned")]
    slow = [beside(30.0, "kernel"), beside(30.0, case="32K prompt, churned")]
    goals = judge([*other, copied(Rates(52.0, 55.1, 96.0))], [*slow, beside(0.3), beside(1.9)])
    assert [goal.met for goal in goals] == [True] * 4
    goals = judge([*other, copied(Rates(51.9, 53.0, 89.0))], [beside(0.3), beside(2.4)])
    assert [(goal.measured, goal.met) for goal in goals] == [
        ("51.9 GB/s", False), ("53.0 GB/s", True), ("89.0 GB/s", False), ("2.40 %", False),
    ]  # fmt: skip
    assert judge(other, slow) == []


REPORT = Report(
    "NVIDIA H200", "2.11.0", Rates(55.0, 55.1, 97.0), [copied(Rates(53.8, 53.7, 96.6))],
    [beside(1.2)], ["--hicache-copy kernel cannot be had here"],
    judge([copied(Rates(53.8, 53.7, 96.6))], [beside(1.2)]),
)  # fmt: skip


def test_the_tables_show_figures_beside_goals_and_what_is_missing():
    console = Console(width=120, record=True)
    show(REPORT, console)
    lines = console.export_text().splitlines()
    assert any("NVIDIA H200" in line for line in lines)
    assert any("up 55.0, down 55.1, both 97.0" in line for line in lines)
    wanted = ["53.8", "53.7", "96.6", "0.20", "ms", "0.73", "ms"]
    assert any(line.split()[-7:] == wanted for line in lines)
    assert any("both ways" in line and ">= 90 GB/s" in line and "yes" in line for line in lines)
    assert any("not measured: --hicache-copy kernel" in line for line in lines)


def test_a_decode_keeps_its_two_streams(monkeypatch):
    """torch hands out 32 streams in turn: were one taken for each burst, copiers that are opened later
    would share a stream with the decode, and copy between its steps instead of beside them."""
    taken: list[object] = []

    def stream(_device: torch.device) -> MagicMock:
        taken.append(MagicMock(name=f"stream {len(taken)}"))
        return taken[-1]

    cuda = MagicMock()
    cuda.Stream = stream
    cuda.Event.return_value.elapsed_time.return_value = 1.0
    entered: list[object] = []
    cuda.stream = lambda where: contextlib.nullcontext(entered.append(where))
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(gpu, "DECODE_LAYERS", 1)
    monkeypatch.setattr(gpu, "DECODE_WIDTH", 8)
    decode = gpu.DecodeLoad(torch.device("cpu"))
    within = []
    for _ in range(3):
        decode.step_seconds(lambda: within.append(entered[-1]))
    assert len(taken) == 2
    assert taken[0] is decode.stream
    assert {id(where) for where in within} == {id(taken[1])}


def run_main(monkeypatch, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", ["deepinfer", "bench", "page-copy", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    return exit_.value.code


def test_without_a_gpu_it_says_so_in_a_sentence_and_exits_with_2(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "nvidia_devices", list)
    assert run_main(monkeypatch) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.strip().startswith("deepinfer: There is no GPU 0 on this machine")
    assert "Traceback" not in captured.err
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_that_torch_cannot_use_is_a_sentence_too(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "nvidia_devices", lambda: ["0"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run_main(monkeypatch) == 2
    assert "finds no usable GPU 0" in capsys.readouterr().err


def test_the_file_holds_all_figures(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(command, "nvidia_devices", lambda: ["0"])
    monkeypatch.setattr(
        "daemon.cli.bench.page_copy.gpu.measure_page_copies", lambda index, progress: REPORT
    )
    command.page_copy(json=tmp_path / "figures.json")
    assert msgspec.json.decode((tmp_path / "figures.json").read_bytes(), type=Report) == REPORT
    assert "53.8" in capsys.readouterr().out
    with pytest.raises(DeepInferError, match="cannot be written"):
        command.page_copy(json=tmp_path / "missing" / "figures.json")
