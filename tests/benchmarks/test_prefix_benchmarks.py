"""What the benchmarks of the prefix cache take and make up."""

from __future__ import annotations

import random

import pytest

from benchmarks.agent.trace import TraceShape, make_trace
from benchmarks.servers import served_options
from daemon.cli.check.sample_text import SampleText

SHAPE = TraceShape(
    sessions=5, turns=4, system_tokens=50, first_tokens=30, turn_tokens=20, output_tokens=8,
    think_seconds=2.0, spread_seconds=10.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("", {}),
        ("--dp 2 --dtype=float32", {"dp": "2", "dtype": "float32"}),
        ("--deterministic --kv-dtype compact", {"deterministic": True, "kv_dtype": "compact"}),
        ("""--hf-overrides '{"a": 1}'""", {"hf_overrides": '{"a": 1}'}),
    ],
)
def test_options_of_the_instance(words, options):
    assert served_options(words) == options


@pytest.mark.parametrize("words", ["2", "--dp 2 3"])
def test_words_that_are_no_options(words):
    with pytest.raises(ValueError, match="belongs to no option"):
        served_options(words)


def trace(seed: int):
    draw = random.Random(seed)
    return make_trace(SHAPE, SampleText(draw, 1.0), draw)


def test_a_trace_follows_from_its_seed():
    assert trace(1) == trace(1)
    assert trace(1) != trace(2)


def test_a_trace_has_the_shape_that_was_asked_for():
    system, sessions = trace(3)
    assert len(system.split()) == 50
    assert [len(session.turns) for session in sessions] == [4] * 5
    for first, *later in (session.turns for session in sessions):
        assert 0 <= first.think_seconds <= 10
        assert 15 <= len(first.user.split()) <= 45
        for turn in later:
            assert 1 <= turn.think_seconds <= 3
            assert 10 <= len(turn.user.split()) <= 30
        for turn in (first, *later):
            assert 4 <= turn.output_tokens <= 12
            assert len(turn.assistant.split()) == turn.output_tokens
