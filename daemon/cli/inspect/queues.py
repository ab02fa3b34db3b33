"""`deepinfer inspect queues`."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from daemon.cli.inspect.session import DEFAULT_OUTPUT, Inspection, Output
from daemon.cli.output import plain_table
from daemon.cli.target import DEFAULT_TARGET, Target
from daemon.cli.units import number
from daemon.inspection.report_types import QueueRow


def queues_table(rows: list[QueueRow]) -> RenderableType:
    if not rows:
        return Text("No process has reported a queue yet.", "dim")
    table = plain_table()
    table.add_column("process", no_wrap=True)
    table.add_column("queue")
    for header in ("depth", "most", "bound"):
        table.add_column(header, justify="right")
    for row in rows:
        full = row.capacity is not None and row.high_water >= row.capacity
        table.add_row(
            row.process,
            row.queue,
            number(row.depth),
            Text(number(row.high_water), "red" if full else ""),
            "–" if row.capacity is None else number(row.capacity),
        )
    return table


def queues(
    *,
    target: Target = DEFAULT_TARGET,
    output: Output = DEFAULT_OUTPUT,
) -> None:
    """Show the queues: how full they are, and how full they have been.

    A queue whose *most* has reached its bound has turned work away, or made it wait elsewhere. One
    without a bound of its own is kept short by other limits, such as --max-waiting. *prompts at* and
    *choices at* are what the router has given to a process and has not been answered yet.
    """
    Inspection("queues", list[QueueRow], queues_table).run(target, output)
