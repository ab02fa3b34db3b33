"""The steps that an engine has launched and not collected yet.

On a GPU a step is only enqueued, and its tokens are on their way to the host in page-locked memory until its
event has passed; on a CPU it has been computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from workers.contract import EngineError, StepResult
from workers.sampling.sampler import SampledTokens


@dataclass(frozen=True)
class LaunchedStep:
    """What a step gave: `sampled` is on the host, complete once collected."""

    number: int
    slots: list[int]
    """Those that a token was sampled for."""
    sampled: SampledTokens
    done: torch.cuda.Event | None

    def result(self) -> StepResult:
        return StepResult(
            step=self.number,
            tokens=self.sampled.tokens.numpy().astype(np.int32),
            logprobs=self.sampled.host_logprobs(),
        )


class LaunchedSteps:
    """First in, first out. Turns whatever a device says into an `EngineError`."""

    def __init__(self, device: torch.device, depth: int) -> None:
        """`depth`: how many may run while the next one is launched."""
        self._device = device
        self._depth = depth
        self._steps: deque[LaunchedStep] = deque()

    def launch(self, number: int, compute: Callable[[], tuple[list[int], SampledTokens]]) -> None:
        """Run `compute`, which yields the sampled slots and their tokens on the device, as step `number`.

        Raises:
            EngineError: too many steps are running, or the device failed.
        """
        if len(self._steps) > self._depth:
            raise EngineError(
                f"{len(self._steps)} steps are running; collect one before the next launch."
            )
        with _device_errors(number), torch.inference_mode():
            slots, sampled = compute()
            done = None
            if self._device.type == "cuda":
                sampled = sampled.to_host()
                done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                done.record()
        self._steps.append(LaunchedStep(number, slots, sampled, done))

    def collect(self) -> LaunchedStep:
        """Wait for the oldest step.

        Raises:
            EngineError: none is running, or the device failed.
        """
        if not self._steps:
            raise EngineError("No step is running.")
        step = self._steps.popleft()
        if step.done is not None:
            with _device_errors(step.number):
                step.done.synchronize()
        return step

    def clear(self) -> None:
        self._steps.clear()


@contextmanager
def _device_errors(number: int) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise EngineError(
            "The device ran out of memory during a step; lower --gpu-memory-utilization or "
            f"--max-batched-tokens ({error})."
        ) from error
    except RuntimeError as error:
        if isinstance(error, EngineError):
            raise
        raise EngineError(f"The device failed during step {number}: {error}") from error
