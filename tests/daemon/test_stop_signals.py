"""Signals as a descriptor, and as an interruption of work that cannot watch one."""

from __future__ import annotations

import os
import select
import signal
import subprocess

import pytest

from daemon.system import stop_signals
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


def test_a_hangup_that_was_ignored_at_the_start_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        signals = StopSignals(hangup_reloads=True)
        os.kill(os.getpid(), signal.SIGHUP)
        assert (signals.take(), signals.take_hangup()) == (False, False)
        signals.close()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("has_terminal", [False, True])
def test_a_hangup_asks_to_reload_but_to_stop_where_a_terminal_can_go(monkeypatch, has_terminal):
    monkeypatch.setattr(stop_signals, "_has_terminal", lambda: has_terminal)
    signals = StopSignals(hangup_reloads=True)
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        assert select.select([signals.fd], [], [], 5)[0] == [signals.fd]
        assert (signals.take(), signals.take_hangup()) == (has_terminal, not has_terminal)
        assert (signals.take(), signals.take_hangup()) == (False, False)
        assert select.select([signals.fd], [], [], 0)[0] == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert (signals.take(), signals.take_hangup()) == (True, False)
    finally:
        signals.close()
