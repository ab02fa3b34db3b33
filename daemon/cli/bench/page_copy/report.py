"""What `deepinfer bench page-copy` reports: the figures, the goals, and how both are shown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

import msgspec
from rich.console import Console
from rich.table import Table

from daemon.cli.output import plain_table
from daemon.cli.units import size

GOAL_CASE: Final = "32K prompt, fresh"
GOAL_METHOD: Final = "auto"
GOAL_ONE_WAY: Final = 52.0
GOAL_BOTH_WAYS: Final = 90.0
GOAL_SLOWDOWN: Final = 2.0


class Rates(msgspec.Struct, frozen=True):
    """10^9 bytes a second; `both`: sum of both directions at once."""

    up: float
    down: float
    both: float


class CopyFigures(msgspec.Struct, frozen=True):
    """One case copied with one method."""

    case: str
    method: str
    row_bytes: int
    mean_run_bytes: float
    gb_per_second: Rates
    issue_ms: float
    """Time that starting the loads takes on the host."""
    load_ms: float
    """From there to the end of the loads on a GPU with nothing else to do: how long a hit waits."""


class SlowdownFigures(msgspec.Struct, frozen=True):
    """A decode-like load with copies beside it."""

    case: str
    method: str
    direction: Literal["up", "down"]
    slowdown_percent: float
    """How much longer its mean step takes."""
    duty_percent: float
    """Share of the time in which a copy runs, had it the machine alone."""


class Goal(msgspec.Struct, frozen=True):
    """What an H200 should reach with `--hicache-copy auto`."""

    what: str
    wanted: str
    measured: str
    met: bool


class Report(msgspec.Struct, frozen=True):
    """What the JSON file holds."""

    device: str
    torch: str
    link_gb_per_second: Rates
    """GB/s of one large copy from and to page-locked memory."""
    copies: list[CopyFigures]
    slowdowns: list[SlowdownFigures]
    missing: list[str]
    """Methods that this machine has not, and why."""
    goals: list[Goal]


def judge(copies: list[CopyFigures], slowdowns: list[SlowdownFigures]) -> list[Goal]:
    """Set the goals beside what was measured; a goal without figures is left out."""
    goals: list[Goal] = []
    for figures in copies:
        if (figures.case, figures.method) != (GOAL_CASE, GOAL_METHOD):
            continue
        rates = figures.gb_per_second
        for what, rate, wanted in (
            ("up", rates.up, GOAL_ONE_WAY),
            ("down", rates.down, GOAL_ONE_WAY),
            ("both ways", rates.both, GOAL_BOTH_WAYS),
        ):
            goals.append(
                Goal(
                    f"{GOAL_CASE}, {what}",
                    f">= {wanted:.0f} GB/s",
                    f"{rate:.1f} GB/s",
                    rate >= wanted,
                )
            )
    beside = [
        figures.slowdown_percent
        for figures in slowdowns
        if (figures.case, figures.method) == (GOAL_CASE, GOAL_METHOD)
    ]
    if beside:
        worst = max(beside)
        goals.append(
            Goal(
                f"{GOAL_CASE}, decode beside, worst way",
                f"<= {GOAL_SLOWDOWN:.0f} % slower",
                f"{worst:.2f} %",
                worst <= GOAL_SLOWDOWN,
            )
        )
    return goals


def show(report: Report, console: Console) -> None:
    link = report.link_gb_per_second
    console.print(f"{report.device}, torch {report.torch}; GB/s = 10^9 bytes a second")
    console.print(
        f"one large copy of page-locked memory: up {link.up:.1f}, down {link.down:.1f}, "
        f"both {link.both:.1f} GB/s"
    )
    for table in _tables(report):
        if table.row_count:
            console.print()
            console.print(table)
    for missing in report.missing:
        console.print(f"not measured: {missing}", style="yellow")


def _tables(report: Report) -> Iterator[Table]:
    copies = _table("CASE", "METHOD", "MEAN RUN", "UP", "DOWN", "BOTH", "ISSUE", "LOAD")
    for figures in report.copies:
        rates = figures.gb_per_second
        copies.add_row(
            figures.case,
            figures.method,
            size(round(figures.mean_run_bytes)),
            *(f"{rate:.1f}" for rate in (rates.up, rates.down, rates.both)),
            f"{figures.issue_ms:.2f} ms",
            f"{figures.load_ms:.2f} ms",
        )
    yield copies
    slowdowns = _table("BESIDE A DECODE", "METHOD", "DIRECTION", "DUTY", "SLOWER BY")
    for beside in report.slowdowns:
        slowdowns.add_row(
            beside.case,
            beside.method,
            beside.direction,
            f"{beside.duty_percent:.0f} %",
            f"{beside.slowdown_percent:.1f} %",
        )
    yield slowdowns
    goals = _table("GOAL (auto)", "WANTED", "MEASURED", "MET")
    for goal in report.goals:
        goals.add_row(goal.what, goal.wanted, goal.measured, "yes" if goal.met else "no")
    yield goals


def _table(*headers: str) -> Table:
    table = plain_table()
    for header in headers:
        table.add_column(header)
    return table
