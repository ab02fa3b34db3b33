"""What a process uses, whatever the machine's clock says."""

from __future__ import annotations

import os
import time

import pytest

from daemon.system.process_start import process_age
from daemon.system.process_usage import ProcessUsage


@pytest.mark.parametrize("years", [-10, 10])
def test_the_share_of_a_core_does_not_depend_on_the_time_of_day(monkeypatch, years):
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + years * 365 * 86400)
    oldest = process_age(os.getpid())
    used = ProcessUsage().read(os.getpid())
    youngest = process_age(os.getpid())
    assert 0.5 < oldest < youngest < time.clock_gettime(time.CLOCK_BOOTTIME)
    share = 100 * used.cpu_seconds
    assert share / youngest <= used.cpu_percent <= share / oldest


def test_a_process_that_has_gone_is_none():
    assert ProcessUsage().read(2**22 + 1) is None
