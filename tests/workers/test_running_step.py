"""Steps that are launched yield their tokens once, and a device's failures are told as such."""

import pytest
import torch

from workers.contract import EngineError
from workers.engine.running_step import StepRunner
from workers.sampling.sampler import SampledTokens

CPU = torch.device("cpu")


def sampled(*tokens: int) -> SampledTokens:
    return SampledTokens(torch.tensor(tokens, dtype=torch.int64), [], [])


def fail(error: Exception):
    raise error


def test_each_step_yields_its_own_tokens_once():
    seen = []
    runner = StepRunner(CPU, 1, 4, seen.append)
    first = runner.launch(7, lambda: ([3], sampled(11)))
    second = runner.launch(8, lambda: ([], sampled()))
    assert first.is_done() and second.is_done()
    result = first.collect()
    assert (first.slots, result.step, result.tokens.tolist()) == ([3], 7, [11])
    assert second.collect().tokens.tolist() == []
    assert seen == [first, second]
    with pytest.raises(EngineError, match="Step 8 was collected already"):
        second.collect()


@pytest.mark.parametrize("depth", [0, 1])
def test_no_more_run_than_may(depth):
    runner = StepRunner(CPU, depth, 4)
    steps = [runner.launch(number, lambda: ([], sampled())) for number in range(depth + 1)]
    with pytest.raises(EngineError, match="collect one"):
        runner.launch(9, lambda: pytest.fail("it must not run"))
    steps[0].collect()
    runner.launch(9, lambda: ([], sampled()))


def test_gradients_are_off():
    runner = StepRunner(CPU, 0, 4)
    step = runner.launch(0, lambda: ([], sampled(int(torch.is_inference_mode_enabled()))))
    assert step.collect().tokens.tolist() == [1]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("so much"), r"out of memory.*--max-batched-tokens \(so much\)"),
        (RuntimeError("an illegal address"), "failed during step 5: an illegal address"),
        (EngineError("The engine is closed."), "^The engine is closed"),
    ],
)
def test_a_failure_is_told_and_leaves_no_step(error, words):
    runner = StepRunner(CPU, 0, 4)
    with pytest.raises(EngineError, match=words):
        runner.launch(5, lambda: fail(error))
    runner.launch(6, lambda: ([], sampled()))
