"""Signals as a descriptor, and as an interruption of work that cannot watch one."""

from __future__ import annotations

import os
import select
import signal
import subprocess

import pytest

from daemon.system.stop_signals import StopRequested, StopSignals


@pytest.fixture
def signals():
    found = StopSignals()
    yield found
    found.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_wakes_a_poller_once(signals, number):
    os.kill(os.getpid(), number)
    assert select.select([signals.fd], [], [], 5)[0] == [signals.fd]
    assert signals.take()
    assert not signals.take()
    assert signals.count == 1


def test_work_that_cannot_watch_is_interrupted(signals):
    with pytest.raises(StopRequested), signals.interrupting():
        # Like the fetch of the default model: a child that we wait for.
        subprocess.run(["sh", "-c", f"kill -TERM {os.getpid()}; exec sleep 60"], check=False)
    assert signals.take()


def test_an_earlier_signal_keeps_the_work_from_starting(signals):
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(StopRequested), signals.interrupting():
        pytest.fail("it ran")
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.count == 2


def test_closing_puts_the_former_handlers_back():
    before = signal.getsignal(signal.SIGTERM)
    StopSignals().close()
    assert signal.getsignal(signal.SIGTERM) is before
