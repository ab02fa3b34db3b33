"""`deepinfer bench` on a GPU: each command runs to its end and its figures are possible ones."""

from __future__ import annotations

import msgspec
import pytest
import torch

from daemon.cli.bench.engine.command import engine
from daemon.cli.bench.engine.report import Report as EngineReport
from daemon.cli.bench.page_copy.command import page_copy
from daemon.cli.bench.page_copy.report import Report
from tests.support.engines import save_random_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def test_all_methods_are_measured(tmp_path):
    pytest.importorskip("cuda.core")
    path = tmp_path / "figures.json"
    page_copy(json=path)
    report = msgspec.json.decode(path.read_bytes(), type=Report)
    assert report.missing == []
    assert len(report.copies) == 8 * 3
    assert len(report.slowdowns) == 2 * 3 * 2
    assert len(report.goals) == 4
    link = report.link_gb_per_second
    for figures in report.copies:
        rates = figures.gb_per_second
        # No copy of small pieces beats the link by more than timing is off.
        assert 0 < rates.up < 1.1 * link.up
        assert 0 < rates.down < 1.1 * link.down
        assert 0 < rates.both < 1.1 * (link.up + link.down)
    # The kernel costs a decode some 5 %; copies that waited for its steps would cost what they take.
    assert all(beside.slowdown_percent < 40 for beside in report.slowdowns)


def test_steps_are_measured_and_taken_apart(tmp_path):
    path = tmp_path / "engine.json"
    model = save_random_llama(tmp_path / "llama", vocab_size=256)
    engine(
        model=str(model), accelerator="nvidia", batch="1,8", context="256", prefill="512", json=path
    )
    report = msgspec.json.decode(path.read_bytes(), type=EngineReport)
    assert report.dtype == "bfloat16"
    assert [case.batch for case in report.cases] == [1, 8, 1]
    assert [case.context for case in report.cases] == [256, 256, 512]
    for case in report.cases:
        assert 0 < case.roofline.fraction < 1
        # Kernels of a step that a graph launches are seen, too.
        assert case.class_ms["products"] > 0
        assert case.class_ms["attention"] > 0
        assert case.launch_ms <= case.ms
