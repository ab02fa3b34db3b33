"""The figures of a hostile run, and how they are shown."""

from __future__ import annotations

import statistics
from collections import Counter

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.hostile.attacks import CUT, SMUGGLED_IN
from benchmarks.hostile.honest import Group
from benchmarks.hostile.watch import Watch

GOAL_RATIO = 2.0


class Phase(msgspec.Struct, frozen=True):
    """What the honest clients got for a while."""

    seconds: float
    sent: int
    answered: int
    wrong: int
    errors: dict[str, int]
    ttft_p50_ms: float
    ttft_p99_ms: float
    health_max_ms: float
    health_errors: int

    @property
    def passed(self) -> bool:
        return self.answered == self.sent and not (self.wrong or self.errors or self.health_errors)


class Memory(msgspec.Struct, frozen=True):
    """MiB. A process that lives only for a while has none before, or after."""

    before: int
    most: int
    after: int


class Figures(msgspec.Struct, frozen=True):
    """Everything that is reported."""

    clients: int
    cores: int
    load_before: float
    load_after: float
    """Of the machine, over a minute: after, with the run's own load in it."""
    alone: Phase
    beside: Phase
    attacks: dict[str, dict[str, int]]
    """How often each attack came to what."""
    memory: dict[str, Memory]
    replaced: list[str]
    """Processes that ended, or were killed as hung."""
    held: dict[str, int]
    """What is still there of requests, once all have left."""

    @property
    def ratio(self) -> float:
        return self.beside.ttft_p99_ms / self.alone.ttft_p99_ms

    @property
    def passed(self) -> bool:
        came_to = {outcome for outcomes in self.attacks.values() for outcome in outcomes}
        broken = came_to & {SMUGGLED_IN, CUT} or self.replaced or self.held
        return self.alone.passed and self.beside.passed and not broken


def make_phase(groups: list[Group], watch: Watch, seconds: float) -> Phase:
    first_texts = [value for group in groups for value in group.first_texts]
    cuts = statistics.quantiles(first_texts, n=100, method="inclusive")
    failures = [failure for group in groups for failure in group.tally.failures]
    return Phase(
        seconds=round(seconds, 1),
        sent=sum(group.tally.requests for group in groups),
        answered=sum(group.tally.completed for group in groups),
        wrong=sum(len(group.tally.wrong) for group in groups),
        errors=Counter(failure.kind for failure in failures),
        ttft_p50_ms=round(cuts[49] * 1e3, 1),
        ttft_p99_ms=round(cuts[98] * 1e3, 1),
        health_max_ms=round(max(watch.health_seconds) * 1e3, 1),
        health_errors=watch.health_errors,
    )


def show(figures: Figures, console: Console) -> None:
    alone, beside = figures.alone, figures.beside
    table = Table(
        "", "alone", "beside hostile clients",
        title=f"{figures.clients} honest clients on {figures.cores} cores "
        f"(load average {figures.load_before:.1f} before, {figures.load_after:.1f} after)",
    )  # fmt: skip
    for label, field in (
        ("seconds", "seconds"), ("honest requests sent", "sent"), ("answered", "answered"),
        ("wrong (0)", "wrong"), ("time to first token, p50 ms", "ttft_p50_ms"),
        ("p99 ms", "ttft_p99_ms"), ("`/health` at most, ms", "health_max_ms"),
        ("`/health` unanswered (0)", "health_errors"),
    ):  # fmt: skip
        table.add_row(label, str(getattr(alone, field)), str(getattr(beside, field)))
    for label in sorted(alone.errors | beside.errors):
        counts = (str(phase.errors.get(label, 0)) for phase in (alone, beside))
        table.add_row(f"error: {label} (0)", *counts)
    table.add_row(f"p99 is × of alone (goal ≤ {GOAL_RATIO:g})", "", f"{figures.ratio:.2f}")
    console.print(table)
    attacks = Table("attack", "came to", title="What became of the attacks")
    for name, outcomes in figures.attacks.items():
        attacks.add_row(name, ", ".join(f"{what}: {n}" for what, n in sorted(outcomes.items())))
    console.print(attacks)
    memory = Table("process", "before", "most", "after", title="Memory, MiB")
    for name, sizes in sorted(figures.memory.items()):
        memory.add_row(name, str(sizes.before), str(sizes.most), str(sizes.after))
    console.print(memory)
    for label, found in (("replaced", figures.replaced), ("still held", figures.held)):
        if found:
            console.print(f"{label}: {found}")
