"""The soak of the prefix cache, shortened: a worker is killed, all answers are right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_short_soak_finds_nothing_wrong(tmp_path):
    report = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.prefix.soak", "--turns", "60", "--every", "2",
               "--conversations", "4", "--seed", "3", "--json", str(report)]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(report.read_bytes())
    assert figures["turns"] == 60
    assert figures["kills"] > 0
    assert figures["hits"] > 10
    assert figures["wrong_texts"] == 0
    assert figures["errors"] == figures["leaks"] == {}
