"""The way of an instance through its phases, and what is told of each."""

from __future__ import annotations

import itertools

import pytest

from daemon.instance.phase import Event, Lifecycle, Phase, next_phase

RUNNING = [phase for phase in Phase if not phase.is_stopping]
STOPPING = [phase for phase in Phase if phase.is_stopping]


def way(*events: Event) -> list[str]:
    phases = itertools.accumulate(events, next_phase, initial=Phase.STARTING)
    return [phase.name for phase in phases]


def test_it_serves_once_the_frontends_act_on_it():
    assert way(Event.ONE_MISSING, Event.ALL_READY, Event.ALL_READY, Event.CONFIRMED) == [
        "STARTING", "STARTING", "CONFIRMING", "CONFIRMING", "SERVING",
    ]  # fmt: skip


def test_a_loss_before_it_served_is_part_of_the_start():
    assert way(Event.ALL_READY, Event.ONE_MISSING) == ["STARTING", "CONFIRMING", "STARTING"]


def test_a_loss_later_degrades_it_until_the_frontends_act_on_the_recovery():
    served = (Event.ALL_READY, Event.CONFIRMED)
    assert way(*served, Event.ONE_MISSING, *served)[2:] == [
        "SERVING", "DEGRADED", "RECOVERING", "SERVING",
    ]  # fmt: skip
    again = way(*served, Event.ONE_MISSING, Event.ALL_READY, Event.ONE_MISSING)
    assert again[-2:] == ["RECOVERING", "DEGRADED"]


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.DEGRADED])
def test_nobody_can_confirm_while_a_process_is_missing(phase):
    assert next_phase(phase, Event.CONFIRMED) is phase


def test_a_stop_takes_its_steps_in_order():
    steps = (Event.STOP, Event.DRAINED, Event.FRONTENDS_GONE, Event.KILL)
    for phase in RUNNING:
        phases = list(itertools.accumulate(steps, next_phase, initial=phase))
        assert phases[1:] == STOPPING


def test_it_can_be_killed_at_each_step_of_a_stop_but_not_before():
    assert {next_phase(phase, Event.KILL) for phase in STOPPING} == {Phase.KILLING}
    assert all(next_phase(phase, Event.KILL) is phase for phase in RUNNING)


def test_there_is_no_way_back_from_a_stop():
    for phase, event in itertools.product(STOPPING, Event):
        assert next_phase(phase, event) in STOPPING[STOPPING.index(phase) :]


def test_only_a_stop_ends_serving_for_good():
    for phase, event in itertools.product(RUNNING, Event):
        assert next_phase(phase, event).is_stopping == (event is Event.STOP)
        if phase.has_served:
            assert next_phase(phase, event).has_served


def test_frontends_hear_of_being_ready_before_others_do():
    assert {phase.name: (phase.for_frontends, phase.for_others) for phase in RUNNING} == {
        "STARTING": ("starting", "starting"),
        "CONFIRMING": ("ready", "starting"),
        "SERVING": ("ready", "ready"),
        "DEGRADED": ("degraded", "degraded"),
        "RECOVERING": ("ready", "degraded"),
    }
    assert {(p.for_frontends, p.for_others) for p in STOPPING} == {("draining", "draining")}


def test_the_time_in_a_phase_runs_from_the_event_that_led_there():
    lifecycle = Lifecycle(since=1.0)
    assert not lifecycle.take(Event.ONE_MISSING, 2.0)
    assert lifecycle.since == 1.0
    assert lifecycle.take(Event.ALL_READY, 3.0)
    assert (lifecycle.phase, lifecycle.since) == (Phase.CONFIRMING, 3.0)
