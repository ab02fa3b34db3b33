"""What `deepinfer bench engine` reports, and how it is shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from daemon.cli.bench.engine.costs import Bound, Peaks, StepCosts
from daemon.cli.bench.engine.kernel_classes import KERNEL_CLASSES, KernelClass, kernel_class
from daemon.cli.output import plain_table
from daemon.cli.units import UNKNOWN, number, rate

NOT_COMPUTED: Final = "not computed for this model"
LONGEST_KERNELS: Final = 12

Phase = Literal["decode", "prefill"]


class PeakFigures(msgspec.Struct, frozen=True):
    gb_per_second: float
    """10^9 bytes a second that one large copy reads and writes."""
    tflops: float
    """10^12 operations a second of one large product, in the type of the weights."""


class ModelFigures(msgspec.Struct, frozen=True):
    """10^9 bytes, 10^9 operations."""

    weights_gb: float
    """Without the embedding table."""
    kv_bytes_a_token: int
    linear_gflop_a_token: float
    """Without attention and without the output layer."""


class Roofline(msgspec.Struct, frozen=True):
    """How fast a step could be."""

    gb: float
    gflop: float
    ms: float
    fraction: float
    """Of it that is reached: its time / the measured time."""
    bound: Bound


class Kernel(msgspec.Struct, frozen=True):
    """All launches of one kernel, or on a CPU calls of one operation, in a step."""

    name: str
    kind: KernelClass
    ms: float
    launches: float


class CaseFigures(msgspec.Struct, frozen=True):
    """Means over steps of one kind."""

    phase: Phase
    batch: int
    context: int
    """Decode: tokens of each sequence. Prefill: tokens of the prompt."""
    ms: float
    launch_ms: float
    """Time of it in which the host starts a step; on a CPU that is all of it."""
    tokens_per_second: float
    roofline: Roofline | None
    """None: not computed for this model."""
    class_ms: dict[KernelClass, float]
    """Under a profiler, which on a CPU slows steps down."""
    kernels: list[Kernel]
    """Those that take longest, and the longest of each class."""

    @property
    def name(self) -> str:
        if self.phase == "prefill":
            return f"prefill {self.context:,}"
        return f"decode {self.batch} × {self.context:,}"

    @property
    def kernel_ms(self) -> float:
        return sum(self.class_ms.values())


class Report(msgspec.Struct, frozen=True):
    """What the JSON file holds."""

    device: str
    torch: str
    model: str
    dtype: str
    peaks: PeakFigures
    costs: ModelFigures | None
    """None: not computed for this model."""
    cases: list[CaseFigures]


def roofline(costs: StepCosts, peaks: Peaks, ms: float) -> Roofline:
    """`ms`: what a step takes."""
    best = peaks.seconds(costs) * 1e3
    return Roofline(costs.bytes / 1e9, costs.flops / 1e9, best, best / ms, peaks.bound(costs))


def kernels(times: Sequence[tuple[str, float, int]], steps: int) -> list[Kernel]:
    """Of the name, the milliseconds and the launches of each kernel in `steps` steps; longest first."""
    found = [
        Kernel(name, kernel_class(name), ms / steps, launches / steps)
        for name, ms, launches in times
        if ms > 0
    ]
    return sorted(found, key=lambda kernel: -kernel.ms)


def longest(found: Sequence[Kernel]) -> list[Kernel]:
    """Of `found`, longest first, some that take longest, and of each class the one that does."""
    of_class = {kernel.kind: kernel for kernel in reversed(found)}
    return [k for i, k in enumerate(found) if i < LONGEST_KERNELS or of_class[k.kind] is k]


def class_times(found: Sequence[Kernel]) -> dict[KernelClass, float]:
    """Milliseconds of each class, and 0 where there is nothing of it."""
    return {
        name: sum(kernel.ms for kernel in found if kernel.kind == name) for name in KERNEL_CLASSES
    }


def show(report: Report, console: Console) -> None:
    console.print(f"{report.model} as {report.dtype} on {report.device}, torch {report.torch}")
    console.print(
        f"roofline: one large copy {report.peaks.gb_per_second:,.0f} GB/s, one large product "
        f"{_figure(report.peaks.tflops)} TFLOP/s (10^9 bytes, 10^12 operations a second)"
    )
    costs = report.costs
    if costs is None:
        console.print(f"bytes and operations of a step: {NOT_COMPUTED}", style="yellow")
    else:
        console.print(
            f"a step reads {_figure(costs.weights_gb)} GB of weights; a token has "
            f"{number(costs.kv_bytes_a_token)} B of KV and takes {_figure(costs.linear_gflop_a_token)} "
            "GFLOP in linear layers"
        )
    for table in _tables(report):
        console.print()
        console.print(table)


def _tables(report: Report) -> Iterator[Table]:
    steps = _table("STEP", "TIME", "LAUNCH", "TOKENS/S", "GB", "GFLOP", "ROOFLINE", "REACHED", "BY")
    for case in report.cases:
        line = case.roofline
        limits = (
            (
                _figure(line.gb),
                _figure(line.gflop),
                f"{line.ms:.2f} ms",
                f"{line.fraction * 100:.0f} %",
                line.bound,
            )
            if line is not None
            else (UNKNOWN,) * 5
        )
        steps.add_row(
            case.name,
            f"{case.ms:.2f} ms",
            f"{case.launch_ms:.2f} ms",
            rate(case.tokens_per_second),
            *limits,
        )
    yield steps
    for case in report.cases:
        if not case.kernels:
            continue
        times = _table(f"{case.name.upper()}: TIME IN", "MS A STEP", "SHARE", "LONGEST")
        for name, ms in sorted(case.class_ms.items(), key=lambda item: -item[1]):
            if ms > 0:
                first = next(kernel.name for kernel in case.kernels if kernel.kind == name)
                share = f"{ms / case.kernel_ms * 100:.1f} %"
                times.add_row(name, f"{ms:.3f}", share, Text(_short(first)))
        times.add_row("all of these", f"{case.kernel_ms:.3f}", "", "")
        if case.ms > case.kernel_ms:
            times.add_row("rest of the step", f"{case.ms - case.kernel_ms:.3f}", "", "")
        yield times


def _figure(value: float) -> str:
    """Four digits, or more before the point."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _short(name: str, limit: int = 60) -> str:
    return name if len(name) <= limit else name[: limit - 1] + "…"


def _table(first: str, *others: str) -> Table:
    table = plain_table()
    table.add_column(first)
    for header in others:
        table.add_column(header, justify="left" if header in ("BY", "LONGEST") else "right")
    return table
