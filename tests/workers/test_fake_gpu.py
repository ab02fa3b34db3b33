"""Steps on a GPU that does not exist, in a process of its own: see `fake_gpu_steps.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

STEPS = Path(__file__).with_name("fake_gpu_steps.py")


@pytest.mark.slow
def test_steps_keep_to_the_gpu_and_never_wait_for_it():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", STEPS],
        cwd=STEPS.parents[2], capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
