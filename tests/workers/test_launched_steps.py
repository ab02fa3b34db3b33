"""Steps are collected in the order of their launch, and a device's failures are told as such."""

import pytest
import torch

from workers.contract import EngineError
from workers.engine.launched_steps import LaunchedSteps
from workers.sampling.sampler import SampledTokens

CPU = torch.device("cpu")


def sampled(*tokens: int) -> SampledTokens:
    return SampledTokens(torch.tensor(tokens, dtype=torch.int64), [], [])


def fail(error: Exception):
    raise error


def test_first_in_first_out():
    steps = LaunchedSteps(CPU, 1)
    steps.launch(7, lambda: ([3], sampled(11)))
    steps.launch(8, lambda: ([], sampled()))
    first = steps.collect()
    assert (first.slots, first.result().step, first.result().tokens.tolist()) == ([3], 7, [11])
    assert steps.collect().result().tokens.tolist() == []
    with pytest.raises(EngineError, match="No step is running"):
        steps.collect()


@pytest.mark.parametrize("depth", [0, 1])
def test_no_more_run_than_may(depth):
    steps = LaunchedSteps(CPU, depth)
    for number in range(depth + 1):
        steps.launch(number, lambda: ([], sampled()))
    with pytest.raises(EngineError, match="collect one"):
        steps.launch(9, lambda: pytest.fail("it must not run"))
    steps.clear()
    steps.launch(9, lambda: ([], sampled()))


def test_gradients_are_off():
    steps = LaunchedSteps(CPU, 0)
    steps.launch(0, lambda: ([], sampled(int(torch.is_inference_mode_enabled()))))
    assert steps.collect().result().tokens.tolist() == [1]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("so much"), r"out of memory.*--max-batched-tokens \(so much\)"),
        (RuntimeError("an illegal address"), "failed during step 5: an illegal address"),
        (EngineError("The engine is closed."), "^The engine is closed"),
    ],
)
def test_a_failure_is_told_and_leaves_no_step(error, words):
    steps = LaunchedSteps(CPU, 0)
    with pytest.raises(EngineError, match=words):
        steps.launch(5, lambda: fail(error))
    with pytest.raises(EngineError, match="No step"):
        steps.collect()
