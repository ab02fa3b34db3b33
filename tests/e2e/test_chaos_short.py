"""The chaos run, shortened: processes are killed and frozen under load, and all answers are right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_some_seconds_of_chaos_leaves_every_answer_right_and_nothing_behind(tmp_path):
    report = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.chaos", "--minutes", "0.2", "--every", "2",
               "--kinds", "6", "--seed", "5", "--json", str(report)]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(report.read_bytes())
    assert figures["completed"] > 20
    assert sum(row["recovered"]["count"] for row in figures["losses"]) > 0
    assert figures["not_recovered"] == 0
    assert figures["wrong_texts"] == figures["tokens_counted_twice"] == 0
    assert figures["unexplained_errors"] == figures["leaks"] == {}
