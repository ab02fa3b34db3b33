"""The measurements of `deepinfer bench engine`, through the product's own engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile

from daemon.cli.bench.engine.costs import ModelCosts, Peaks, StepCosts
from daemon.cli.bench.engine.model_costs import model_costs, weights_dtype
from daemon.cli.bench.engine.peaks import measure_peaks
from daemon.cli.bench.engine.report import (
    CaseFigures,
    Kernel,
    ModelFigures,
    PeakFigures,
    Phase,
    Report,
    class_times,
    kernels,
    longest,
    roofline,
)
from daemon.cli.bench.engine.steps import Stepper, Timing
from daemon.errors import DeepInferError
from transport.model_files import ModelError
from workers.contract import EngineError
from workers.engine.create import create_engine
from workers.engine.engine import ModelEngine
from workers.hardware.device import open_device
from workers.models.hf.model import HfModel
from workers.models.served_model import LoadObserver
from workers.settings import EngineSettings

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Cases:
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prefills: tuple[int, ...]

    def longest(self, steps: StepCounts) -> int:
        """Tokens that one sequence reaches."""
        decodes = [steps.first_position(context) + steps.decoded for context in self.contexts]
        return max((*decodes, *self.prefills)) + 1


@dataclass(frozen=True)
class StepCounts:
    """How many steps of a kind are run."""

    warm: int
    decode: int
    """Odd, so that one is in the middle."""
    prefill: int
    profiled: int

    @property
    def decoded(self) -> int:
        return self.warm + self.decode

    def first_position(self, context: int) -> int:
        """Where decodes begin so that the sequences have `context` tokens in the middle of those that are
        timed, or as few as can be."""
        return max(1, context - 1 - self.decode // 2 - self.warm)

    def mean_context(self, first: int) -> int:
        return first + 1 + self.warm + self.decode // 2


STEPS: Final = {
    "cpu": StepCounts(warm=1, decode=5, prefill=2, profiled=1),
    "cuda": StepCounts(warm=8, decode=41, prefill=6, profiled=3),
}


def measure_engine(
    settings: EngineSettings, model: str, cases: Cases, progress: Progress
) -> Report:
    """Measure all `cases`.

    Args:
        settings: of the engine; the model's length, and how many tokens and sequences a step takes, are
            replaced by what the cases need.
        model: its name in the report.
        cases: what to measure.
        progress: receives a line of text at each stage.

    Raises:
        DeepInferError: the model cannot be loaded, or memory is short.
    """
    try:
        device = open_device(settings.accelerator, settings.device_index, settings.num_threads)
        counts = STEPS[device.type]
        model_dir = Path(settings.model_dir)
        dtype = weights_dtype(model_dir, settings.dtype, device)
        progress("one large copy, one large product")
        peaks = measure_peaks(device, getattr(torch, dtype))
        with _open_engine(settings, cases, counts, progress) as engine:
            is_known = isinstance(engine.model, HfModel)
            costs = model_costs(model_dir, dtype, engine.info.layout) if is_known else None
            bench = _Bench(engine, device, counts, costs, peaks)
            return Report(
                engine.info.device,
                str(torch.__version__),
                model,
                dtype,
                PeakFigures(peaks.bytes_per_second / 1e9, peaks.flops_per_second / 1e12),
                None if costs is None else _model_figures(costs),
                bench.run(cases, progress),
            )
    except (ModelError, EngineError, torch.OutOfMemoryError) as error:
        raise DeepInferError(f"The engine cannot be measured: {error}") from error


@contextmanager
def _open_engine(
    settings: EngineSettings, cases: Cases, counts: StepCounts, progress: Progress
) -> Iterator[ModelEngine]:
    settings = msgspec.structs.replace(
        settings,
        max_model_len=cases.longest(counts),
        max_num_seqs=max((1, *cases.batches)),
        max_batched_tokens=max((*cases.batches, *cases.prefills)),
    )
    engine = create_engine(settings, LoadObserver(report=progress))
    try:
        yield engine
    finally:
        engine.close()


def _model_figures(costs: ModelCosts) -> ModelFigures:
    return ModelFigures(costs.weight_bytes / 1e9, costs.kv_bytes, costs.token_flops / 1e9)


class _Bench:
    """Measures one case after the other on an open engine."""

    def __init__(
        self,
        engine: ModelEngine,
        device: torch.device,
        counts: StepCounts,
        costs: ModelCosts | None,
        peaks: Peaks,
    ) -> None:
        self._stepper = Stepper(engine)
        self._device = device
        self._counts = counts
        self._costs = costs
        self._peaks = peaks

    def run(self, cases: Cases, progress: Progress) -> list[CaseFigures]:
        decodes = [(batch, context) for context in cases.contexts for batch in cases.batches]
        for batch, context in decodes:  # before the first of them takes its time
            first = self._counts.first_position(context)
            self._stepper.check_decode(batch, first + self._counts.decoded)
        for tokens in cases.prefills:
            self._stepper.check_prefill(tokens)
        figures: list[CaseFigures] = []
        for batch, context in decodes:
            progress(f"decode, batch {batch}, context {context:,}")
            figures.append(self._decode(batch, context))
        for tokens in cases.prefills:
            progress(f"prefill of {tokens:,} tokens")
            figures.append(self._prefill(tokens))
        return figures

    def _decode(self, batch: int, context: int) -> CaseFigures:
        counts = self._counts
        first = counts.first_position(context)
        mean = counts.mean_context(first)
        timing = self._stepper.decode(batch, first, counts.warm, counts.decode)
        found = self._profile(
            lambda: self._stepper.decode(batch, mean - 1, 0, counts.profiled), counts.profiled
        )
        costs = self._costs.decode(batch, mean) if self._costs else None
        return self._figures("decode", batch, mean, batch, timing, costs, found)

    def _prefill(self, tokens: int) -> CaseFigures:
        counts = self._counts
        timing = self._stepper.prefill(tokens, counts.warm, counts.prefill)
        found = self._profile(lambda: self._stepper.prefill(tokens, 0, 1), 1)
        costs = self._costs.prefill(tokens) if self._costs else None
        return self._figures("prefill", 1, tokens, tokens, timing, costs, found)

    def _figures(
        self,
        phase: Phase,
        batch: int,
        context: int,
        tokens: int,
        timing: Timing,
        costs: StepCosts | None,
        found: list[Kernel],
    ) -> CaseFigures:
        ms = timing.seconds * 1e3
        return CaseFigures(
            phase=phase,
            batch=batch,
            context=context,
            ms=ms,
            launch_ms=timing.launch_seconds * 1e3,
            tokens_per_second=tokens / timing.seconds,
            roofline=None if costs is None else roofline(costs, self._peaks, ms),
            class_ms=class_times(found),
            kernels=longest(found),
        )

    def _profile(self, run: Callable[[], object], steps: int) -> list[Kernel]:
        """What the kernels of `steps` steps, or on a CPU the operations, take each by itself."""
        on_gpu = self._device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        with profile(activities=activities) as profiler:
            run()
            if on_gpu:
                torch.cuda.synchronize(self._device)
        wanted = "CUDA" if on_gpu else "CPU"
        times = [
            (
                event.key,
                (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3,
                event.count,
            )
            for event in profiler.key_averages()
            if event.device_type.name == wanted and not event.is_user_annotation
        ]
        return kernels(times, steps)
