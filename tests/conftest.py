"""Fixtures that several test folders share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from daemon.default_model.fetch import DefaultModelError, ensure_default_model

# As the daemon starts its workers: threads of torch that wait must not spin. Before torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Tables are as wide as they need: pytest-xdist tells its workers of a terminal that they do not have.
os.environ.pop("COLUMNS", None)
# Triton, where it is installed, interprets its kernels on a machine without a GPU. Before Triton is loaded.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Tests never look a model up on the network; the default model comes through pip alone.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A slow or busy machine is no failure.
settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """Directory of the default model, fetched and converted if this machine lacks it."""
    try:
        return ensure_default_model(lambda line: None)
    except DefaultModelError as error:
        pytest.fail(str(error))
