"""`deepinfer inspect processes`."""

from __future__ import annotations

from rich.console import OverflowMethod, RenderableType
from rich.text import Text

from daemon.cli.inspect.session import DEFAULT_OUTPUT, Inspection, Output
from daemon.cli.output import plain_table
from daemon.cli.target import DEFAULT_TARGET, Target
from daemon.cli.units import duration, percent, size
from daemon.inspection.report_types import ProcessRow

HANGS_SECONDS = 10.0
"""A main loop turns several times a second, except in a long step of the engine."""
STATE_STYLES = {
    "ready": "green",
    "starting": "yellow",
    "loading": "yellow",
    "degraded": "yellow",
    "draining": "yellow",
    "stopping": "yellow",
    "restarting": "red",
    "ended": "bold red",
}


def processes_table(rows: list[ProcessRow], one_line: bool = False) -> RenderableType:
    """One row per process; with `one_line`, long notes are cut instead of wrapped."""
    table = plain_table()
    table.add_column("process", no_wrap=True)
    table.add_column("pid", justify="right")
    table.add_column("state", no_wrap=True)
    has_gpu = any(row.gpu_memory_bytes is not None for row in rows)
    headers = ("uptime", "memory", "gpu", "cpu", "beat")
    for header in headers:
        if header != "gpu" or has_gpu:
            table.add_column(header, justify="right", no_wrap=True)
    overflow: OverflowMethod = "ellipsis" if one_line else "fold"
    table.add_column("note", no_wrap=one_line, overflow=overflow, ratio=1)
    table.expand = True  # gives the note what the others leave
    for row in rows:
        table.add_row(
            row.name,
            "–" if row.pid is None else str(row.pid),
            Text(row.state, STATE_STYLES.get(row.state, "")),
            duration(row.uptime_seconds),
            size(row.rss_bytes),
            *([size(row.gpu_memory_bytes)] if has_gpu else []),
            percent(row.cpu_percent),
            duration(row.heartbeat_age_seconds),
            _note(row),
        )
    return table


def hangs(row: ProcessRow) -> bool:
    age = row.progress_age_seconds
    return row.state in ("ready", "draining") and age is not None and age > HANGS_SECONDS


def _note(row: ProcessRow) -> Text:
    if hangs(row):
        return Text(f"stands still for {duration(row.progress_age_seconds)}", "bold red")
    parts = [row.detail] if row.detail else []
    if row.restarts:
        parts.append(f"restarted {row.restarts}×")
    if row.last_exit:
        parts.append(f"last exit: {row.last_exit}")
    return Text("; ".join(parts), "dim")


def processes(
    *,
    target: Target = DEFAULT_TARGET,
    output: Output = DEFAULT_OUTPUT,
) -> None:
    """Show every process of the instance: is it up, does it move, what does it use?

    *beat* is the age of its last heartbeat; a process whose main loop stands still while its
    heartbeats go on is marked as hanging. *gpu* is what a worker has taken of its GPU for tensors,
    *cpu* the share of one core since the last look.
    """
    Inspection("processes", list[ProcessRow], processes_table).run(target, output)
