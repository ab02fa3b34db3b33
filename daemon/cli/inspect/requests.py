"""`deepinfer inspect requests`."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from daemon.cli.inspect.session import DEFAULT_OUTPUT, Inspection, Output
from daemon.cli.output import plain_table
from daemon.cli.target import DEFAULT_TARGET, Target
from daemon.cli.units import milliseconds, number
from daemon.inspection.report_types import RequestReport

STAGE_STYLES = {
    "received": "yellow",
    "tokenizing": "yellow",
    "queued": "yellow",
    "running": "green",
}


def requests_table(rows: list[RequestReport], most: int | None = None) -> RenderableType:
    if not rows:
        return Text("No live requests.", "dim")
    table = plain_table()
    table.add_column("request", overflow="ellipsis", min_width=10)  # gives way to the others
    table.add_column("stage", no_wrap=True)
    table.add_column("rank", justify="right")
    for header in ("in stage", "age", "prompt", "output", "encode", "queue", "run"):
        table.add_column(header, justify="right", no_wrap=True)
    shown = rows if most is None else rows[:most]
    for row in shown:
        table.add_row(
            row.request_id,
            Text(row.stage, STAGE_STYLES.get(row.stage, "")),
            number(row.rank),
            milliseconds(row.stage_ms),
            milliseconds(row.age_ms),
            number(row.prompt_tokens) if row.prompt_tokens else "–",
            number(row.output_tokens),
            milliseconds(row.tokenizing_ms),
            milliseconds(row.queued_ms),
            milliseconds(row.running_ms),
        )
    hidden = len(rows) - len(shown)
    return Group(table, Text(f"and {hidden:,} more", "dim")) if hidden else table


def requests(
    *,
    target: Target = DEFAULT_TARGET,
    output: Output = DEFAULT_OUTPUT,
) -> None:
    """Show the live requests, oldest first: where each one is, and how long each stage took.

    *in stage* is the time since it came to where it is now; it is less than the others tell if the
    request was moved to another worker. *encode* is the time with the tokenizer, *queue* the time
    until a worker began with it, *run* the time since. At most a thousand are shown; --json tells
    more of each.
    """
    Inspection("requests", list[RequestReport], requests_table).run(target, output)
