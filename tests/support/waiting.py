"""Waiting for what another thread or process does in its own time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import pytest

Answer = TypeVar("Answer")


def eventually(
    check: Callable[[], Answer], seconds: float = 60.0, what: str = "the condition holds"
) -> Answer:
    """The first true answer of `check`; fails the test after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        answer = check()
        if answer:
            return answer
        if time.monotonic() > deadline:
            pytest.fail(f"after {seconds:g} s still not: {what}")
        time.sleep(0.01)
