"""The figures of a chaos run, and how they are shown."""

from __future__ import annotations

import statistics
from collections import Counter

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.chaos.causes import Loss
from benchmarks.clients.known import Tally
from benchmarks.clients.requests import Failure


class Spread(msgspec.Struct, frozen=True):
    """Seconds."""

    count: int
    p50: float
    p99: float
    max: float


class LossFigures(msgspec.Struct, frozen=True):
    """Losses of one role by one means."""

    role: str
    means: str
    """killed or frozen."""
    served: Spread | None
    """From the loss until a request sent after it had succeeded."""
    replaced: Spread | None
    """Until the successor was ready."""
    recovered: Spread | None
    """Until successor and `/ready` were ready and a request had succeeded."""
    errors: int
    """Requests that failed because of them."""


class Figures(msgspec.Struct, frozen=True):
    """Everything that is reported."""

    seed: int
    minutes: float
    model: str
    kinds_of_requests: int
    unsteady: int
    """Kinds left out because their undisturbed answers differed."""
    requests: int
    completed: int
    left_by_client: int
    tokens: int
    wrong_texts: int
    tokens_counted_twice: int
    errors: dict[str, int]
    unexplained_errors: dict[str, int]
    losses: list[LossFigures]
    all_recovered: Spread | None
    not_recovered: int
    leaks: dict[str, int]

    @property
    def passed(self) -> bool:
        wrong = self.wrong_texts + self.tokens_counted_twice + self.not_recovered
        return not (wrong or self.unexplained_errors or self.leaks)


def spread(values: list[float]) -> Spread | None:
    if not values:
        return None
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else values
    p50, p99 = statistics.median(values), cuts[-1]
    return Spread(len(values), round(p50, 3), round(p99, 3), round(max(values), 3))


def loss_figures(losses: list[Loss]) -> list[LossFigures]:
    groups: dict[tuple[str, str], list[Loss]] = {}
    for loss in losses:
        groups.setdefault((loss.role, "frozen" if loss.frozen else "killed"), []).append(loss)
    return [
        LossFigures(
            role, means,
            spread([x.served_after for x in group if x.served_after is not None]),
            spread([x.replaced_after for x in group if x.replaced_after is not None]),
            spread([x.recovered_after for x in group if x.recovered_after is not None]),
            sum(x.errors for x in group),
        )
        for (role, means), group in sorted(groups.items())
    ]  # fmt: skip


def make_figures(
    *, seed: int, minutes: float, model: str, kinds: int, unsteady: int, tally: Tally,
    losses: list[Loss], unexplained: list[Failure], leaks: dict[str, int],
) -> Figures:  # fmt: skip
    times = [loss.recovered_after for loss in losses if loss.recovered_after is not None]
    return Figures(
        seed=seed, minutes=minutes, model=model, kinds_of_requests=kinds, unsteady=unsteady,
        requests=tally.requests, completed=tally.completed, left_by_client=tally.left,
        tokens=tally.tokens, wrong_texts=len(tally.wrong),
        tokens_counted_twice=tally.counted_twice,
        errors=Counter(failure.kind for failure in tally.failures),
        unexplained_errors=Counter(failure.kind for failure in unexplained), losses=loss_figures(losses),
        all_recovered=spread(times), not_recovered=len(losses) - len(times), leaks=leaks,
    )  # fmt: skip


def show(figures: Figures, console: Console) -> None:
    table = Table("", "", title=f"{figures.minutes:g} minutes of chaos, seed {figures.seed}")
    for label, value in (
        ("requests", figures.requests),
        ("completed", figures.completed),
        ("left by the client", figures.left_by_client),
        ("tokens", figures.tokens),
        ("wrong texts (0)", figures.wrong_texts),
        ("tokens counted twice (0)", figures.tokens_counted_twice),
        ("losses not recovered from (0)", figures.not_recovered),
        ("leaks (0)", sum(map(abs, figures.leaks.values()))),
        ("unsteady kinds of requests, left out", figures.unsteady),
    ):
        table.add_row(label, f"{value:,}")
    console.print(table)
    errors = Table("error", "count", "unexplained (0)", title="Requests that failed")
    for name, count in Counter(figures.errors).most_common():
        errors.add_row(name, str(count), str(figures.unexplained_errors.get(name, 0)))
    console.print(errors)
    title = "Seconds from the loss, p50 / p99 / max"
    times = Table("lost", "", "times", "next success", "replaced", "all ready", "errors",
                  title=title)  # fmt: skip
    for row in figures.losses:
        times_seen = "" if row.recovered is None else str(row.recovered.count)
        spreads = (row.served, row.replaced, row.recovered)
        times.add_row(row.role, row.means, times_seen, *map(_words, spreads), str(row.errors))
    overall = figures.all_recovered
    times.add_row("all", "", "" if overall is None else str(overall.count), "", "", _words(overall))
    console.print(times)
    for name, count in figures.leaks.items():
        console.print(f"[red]leak:[/] {name}: {count}")
    console.print("[green]passed[/]" if figures.passed else "[red]failed[/]")


def _words(spread: Spread | None) -> str:
    return "" if spread is None else f"{spread.p50:.1f} / {spread.p99:.1f} / {spread.max:.1f}"
