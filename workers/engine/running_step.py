"""A step that an engine has launched, and the guard around its computation.

On a GPU a step is only enqueued, and its tokens are on their way to the host in page-locked memory until its
event has passed; on a CPU it has been computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from workers.contract import EngineError, StepResult
from workers.sampling.sampler import SampledTokens


@dataclass
class RunningStep:
    """Implements `workers.contract.LaunchedStep`."""

    number: int
    slots: list[int]
    """Slots that a token was sampled for."""
    sampled: SampledTokens
    """On the host, complete once the step is done."""
    done: torch.cuda.Event | None
    on_collect: Callable[[RunningStep], None]
    """Called once, when the step is done."""
    is_collected: bool = False

    def is_done(self) -> bool:
        return self.done is None or bool(self.done.query())  # type: ignore[no-untyped-call]

    def collect(self) -> StepResult:
        if self.is_collected:
            raise EngineError(f"Step {self.number} was collected already.")
        self.is_collected = True
        if self.done is not None:
            with _device_errors(self.number):
                self.done.synchronize()
        self.on_collect(self)
        return StepResult(
            step=self.number,
            tokens=self.sampled.tokens.numpy().astype(np.int32),
            logprobs=self.sampled.host_logprobs(),
        )


class StepRunner:
    """Starts steps on a device and bounds how many run at once."""

    def __init__(
        self,
        device: torch.device,
        depth: int,
        max_num_seqs: int,
        on_collect: Callable[[RunningStep], None] = lambda _step: None,
    ) -> None:
        self._device = device
        self._depth = depth
        self._on_collect = on_collect
        self._num_running = 0
        self._turn = 0
        self._landing: list[Tensor] = []
        """Page-locked memory for token ids: one piece for each step that may run, and one that is read."""
        if device.type == "cuda":
            shape = (max_num_seqs,)
            self._landing = [
                torch.zeros(shape, dtype=torch.int64, pin_memory=True) for _ in range(depth + 2)
            ]

    def launch(
        self, number: int, compute: Callable[[], tuple[list[int], SampledTokens]]
    ) -> RunningStep:
        """Run `compute`, which returns the sampled slots and their tokens on the device.

        Raises:
            EngineError: too many steps are running, or the device failed.
        """
        if self._num_running > self._depth:
            raise EngineError(
                f"{self._num_running} steps are running; collect one before the next launch."
            )
        with _device_errors(number), torch.inference_mode():
            slots, sampled = compute()
            done = None
            if self._device.type == "cuda":
                self._turn = (self._turn + 1) % len(self._landing)
                sampled = sampled.to_host(self._landing[self._turn])
                done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                done.record()
        self._num_running += 1
        return RunningStep(number, slots, sampled, done, self._collected)

    def _collected(self, step: RunningStep) -> None:
        self._num_running -= 1
        self._on_collect(step)


@contextmanager
def _device_errors(number: int) -> Iterator[None]:
    """Turn any device failure into an `EngineError`."""
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
