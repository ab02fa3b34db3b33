"""Silent, stalled, and merely quiet processes are told apart."""

from __future__ import annotations

import pytest

from daemon.supervision.hang_watch import LOADING_SECONDS, UNHEARD_SECONDS, HangWatch

HEARTBEAT, HANG, STALL, START = 0.5, 5.0, 30.0, 600.0


@pytest.fixture
def watch() -> HangWatch:
    return HangWatch(HEARTBEAT, HANG, STALL, START)


@pytest.fixture
def child(make_child):
    child = make_child(state="ready")
    child.snapshot_at = child.progress_at = 100.0
    child.served_from = 100.0
    return child


def look(watch, child, start: float, end: float):
    """Look each 0.25 s, as the daemon does; the last answer."""
    hung = []
    now = start
    while now <= end and not hung:
        hung = watch.look([child], now)
        now += 0.25
    return hung


def test_a_stopped_process_is_not_ready_within_a_second_and_hung_after_hang_seconds(watch, child):
    assert look(watch, child, 100.0, 100.75) == []
    assert child.ready
    assert look(watch, child, 101.0, 101.0) == []
    assert not child.ready
    (hung,) = look(watch, child, 101.25, 110.0)
    assert hung.child is child
    assert "no heartbeat for 5." in hung.reason


def test_the_daemon_is_woken_when_a_process_falls_silent_and_not_at_its_next_turn(
    watch, child, make_child
):
    late = make_child(name="worker/1", state="ready", snapshot_at=100.3, served_from=90.0)
    silent_at = watch.next_silence([late, child])
    assert 100.0 + HEARTBEAT < silent_at <= 100.0 + 1.0
    watch.look([child, late], silent_at)
    assert (child.ready, late.ready) == (False, True)
    assert watch.next_silence([late, child]) == pytest.approx(silent_at + 0.3)
    assert watch.next_silence([child]) is None


@pytest.mark.parametrize("heartbeat", [0.05, 0.1, 0.25])
def test_short_heartbeats_do_not_make_a_starved_process_silent(child, heartbeat):
    watch = HangWatch(heartbeat, HANG, STALL, START)
    assert watch.look([child], 100.0 + 0.45) == []
    assert child.ready
    watch.look([child], 101.0)
    assert not child.ready


def test_long_heartbeats_are_waited_for(child):
    watch = HangWatch(2.0, HANG, STALL, START)
    watch.look([child], 103.0)
    assert child.ready
    watch.look([child], 104.0)
    assert not child.ready


def test_a_process_that_comes_back_is_ready_again(watch, child):
    look(watch, child, 100.0, 102.0)
    assert not child.ready
    child.snapshot_at = child.progress_at = 102.2
    assert look(watch, child, 102.25, 102.5) == []
    assert child.ready


def test_a_main_loop_that_stands_still_is_hung_although_heartbeats_come(watch, child):
    now = 100.0
    while now < 200.0:
        child.snapshot_at = now
        hung = watch.look([child], now)
        if hung:
            break
        now += 0.25
    assert 100.0 + STALL < now < 100.0 + STALL + 1.0
    assert "main loop" in hung[0].reason


def test_a_daemon_that_was_stopped_itself_blames_nobody(watch, child):
    look(watch, child, 100.0, 100.5)
    assert watch.look([child], 160.0) == []
    assert child.ready
    assert look(watch, child, 160.25, 170.0), "from then on silence counts again"


def test_a_machine_that_stood_still_for_a_moment_makes_no_process_silent_or_hung(child):
    watch = HangWatch(HEARTBEAT, 2.0, STALL, START)
    look(watch, child, 100.0, 100.25)
    for now in (102.5, 105.5, 107.0):  # each time longer than the limit, or nearly
        assert watch.look([child], now) == []
        assert child.ready
    assert look(watch, child, 107.25, 110.0), "from then on silence counts again"


def test_a_gap_forgives_no_more_than_itself(watch, child):
    assert look(watch, child, 100.0, 104.0) == []
    assert watch.look([child], 106.0) == []
    assert look(watch, child, 106.25, 106.75) == []
    assert look(watch, child, 107.25, 107.25), "it was silent for 4 s before the gap"


def test_what_came_after_the_gap_is_not_dated_into_the_future(watch, child):
    watch.look([child], 100.0)
    child.snapshot_at = child.progress_at = 104.9  # read in the turn that ends the gap
    watch.look([child], 105.0)
    assert child.snapshot_at == child.progress_at == 105.0


def test_a_process_that_is_loading_may_be_silent_for_longer(watch, child):
    child.state, child.served_from = "loading", None
    assert look(watch, child, 100.0, 100.0 + LOADING_SECONDS) == []
    assert look(watch, child, 100.0 + LOADING_SECONDS, 140.0), "but not for ever"


def test_a_process_that_was_never_heard_of_gets_a_minute(watch, child):
    child.state, child.served_from = None, None
    assert look(watch, child, 100.0, 100.0 + UNHEARD_SECONDS) == []
    assert look(watch, child, 100.0 + UNHEARD_SECONDS, 170.0)


def test_a_process_that_has_served_gets_no_more_time_while_it_joins_a_new_router(watch, child):
    child.state = "loading"
    assert look(watch, child, 100.0, 100.0 + HANG) == []
    assert look(watch, child, 100.0 + HANG, 107.0)


def test_a_process_that_loads_for_ever_is_hung(watch, make_child):
    """It sends heartbeats and says what it does, and never comes to an end."""
    child = make_child(state="loading", detail="loading the model", started_at=100.0)
    now = 100.0
    while now < 100.0 + START:
        child.snapshot_at = child.progress_at = now
        assert watch.look([child], now) == []
        now += 0.5
    child.snapshot_at = now + 0.5
    (hung,) = watch.look([child], now + 0.5)
    assert hung.reason == "not ready after 600 s: loading the model; see --start-timeout"


def test_time_in_which_the_daemon_stood_still_does_not_count_as_loading(watch, make_child):
    child = make_child(state="loading", started_at=100.0)
    child.snapshot_at = child.progress_at = 100.0
    watch.look([child], 100.5)
    assert watch.look([child], 100.5 + 2 * START) == []
