"""The hostile run, shortened: beside ten hostile clients every honest request gets its right answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ATTACKS = 10


@pytest.mark.slow
def test_honest_clients_are_answered_beside_hostile_ones(tmp_path, smollm2_dir):
    report = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.hostile", "--minutes", "0.1", "--clients", "12",
               "--serve", f"--model {smollm2_dir}", "--json", str(report)]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(report.read_bytes())
    for phase in (figures["alone"], figures["beside"]):
        assert phase["answered"] == phase["sent"] >= 12
        assert phase["wrong"] == phase["health_errors"] == 0
        assert phase["errors"] == {}
    assert len(figures["attacks"]) == ATTACKS
