"""The report as a picture: cases under the roofline, and where each one's time goes."""

from __future__ import annotations

import io
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from daemon.cli.bench.engine.kernel_classes import KERNEL_CLASSES, KernelClass
from daemon.cli.bench.engine.report import NOT_COMPUTED, CaseFigures, Report, Roofline

_COLOURS: Final[dict[KernelClass, str]] = {
    "products": "#2f6690",
    "attention": "#d1495b",
    "norms, rotary, gates": "#66a182",
    "KV store": "#edae49",
    "sampling": "#8d6a9f",
    "copies": "#8c8c8c",
    "other": "#c9c9c9",
}
_INK: Final = "#333333"
_LEAST_LABELLED: Final = 7.0
"""Per cent of a bar from which a class's share is written into it."""


def draw(report: Report) -> bytes:
    """Return a PNG file."""
    rows = len(report.cases)
    figure = Figure(figsize=(13.5, 3.6 + 0.42 * max(rows, 4)), dpi=150, layout="constrained")
    title = f"{report.model}, {report.dtype}, {report.device}"
    if report.costs is None:
        shares = figure.subplots()
        title += f"; roofline {NOT_COMPUTED}"
    else:
        roof, shares = figure.subplots(1, 2, width_ratios=(1, 1.15))
        _draw_roofline(roof, report)
    figure.suptitle(title, color=_INK)
    _draw_shares(shares, report.cases)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=_INK)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw_roofline(axes: Axes, report: Report) -> None:
    """Operations a second over operations a byte, both axes logarithmic."""
    axes.set_title(
        "Steps under the roofline, and the share of it that they reach", loc="left", fontsize=11
    )
    cases = [(case, case.roofline) for case in report.cases if case.roofline is not None]
    peaks = report.peaks
    ridge = peaks.tflops * 1e3 / peaks.gb_per_second
    intensities = [line.gflop / line.gb for _, line in cases]
    left, right = min(*intensities, ridge) / 3, max(*intensities, ridge) * 4
    corners = [left, ridge, right]
    heights = [left * peaks.gb_per_second / 1e3, peaks.tflops, peaks.tflops]
    axes.plot(corners, heights, color=_INK, linewidth=1.5)
    axes.fill_between(corners, heights, color="#f2f4f6")
    _note(axes, f"{peaks.tflops:,.4g} TFLOP/s", (right, peaks.tflops), (0, 5), "right")
    middle = (left * ridge) ** 0.5
    slope = (middle, middle * peaks.gb_per_second / 1e3)
    _note(axes, f"{peaks.gb_per_second:,.0f} GB/s", slope, (-8, 6), "right")
    for (case, line), intensity in zip(cases, intensities, strict=True):
        is_right = intensity > ridge
        _draw_case(axes, case, line, intensity, "right" if is_right else "left")
    axes.set(
        xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s", xlim=(left, right)
    )


def _note(
    axes: Axes, text: str, place: tuple[float, float], offset: tuple[int, int], side: str
) -> None:
    """`side`: the end of the text that is at `place`; `offset` in points."""
    axes.annotate(text, place, offset, textcoords="offset points", ha=side, fontsize=9, color=_INK)


def _draw_case(axes: Axes, case: CaseFigures, line: Roofline, intensity: float, side: str) -> None:
    reached = line.gflop / case.ms
    colour = _COLOURS["attention" if case.phase == "decode" else "products"]
    axes.plot([intensity, intensity], [reached, line.gflop / line.ms], color=colour, alpha=0.4)
    axes.plot([intensity], [reached], "o", color=colour)
    text = f"{case.name}: {line.fraction * 100:.0f} %"
    _note(axes, text, (intensity, reached), (7 if side == "left" else -7, -13), side)


def _draw_shares(axes: Axes, cases: list[CaseFigures]) -> None:
    axes.set_title("Where the kernels' time goes, and what a step takes", loc="left", fontsize=11)
    places = list(range(len(cases)))
    starts = [0.0] * len(cases)
    for name in KERNEL_CLASSES:
        shares = [
            100 * case.class_ms.get(name, 0.0) / case.kernel_ms if case.kernel_ms else 0.0
            for case in cases
        ]
        bars = axes.barh(places, shares, left=starts, color=_COLOURS[name], label=name, height=0.68)
        labels = [f"{share:.0f} %" if share >= _LEAST_LABELLED else "" for share in shares]
        axes.bar_label(bars, labels, label_type="center", fontsize=8, color="white")
        starts = [start + share for start, share in zip(starts, shares, strict=True)]
    for place, case in zip(places, cases, strict=True):
        axes.text(101.5, place, f"{case.ms:,.2f} ms", va="center", fontsize=9, color=_INK)
    axes.set_yticks(places, [case.name for case in cases])
    axes.invert_yaxis()
    axes.set(xlim=(0, 116), xticks=range(0, 101, 20), xlabel="% of the kernels' time")
    axes.legend(
        ncols=4, fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.45, -0.16)
    )
