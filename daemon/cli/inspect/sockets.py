"""`deepinfer inspect sockets`."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from daemon.cli.inspect.session import DEFAULT_OUTPUT, Inspection, Output
from daemon.cli.output import plain_table
from daemon.cli.target import DEFAULT_TARGET, Target
from daemon.cli.units import number, size
from daemon.inspection.report_types import SocketRow


def sockets_table(rows: list[SocketRow]) -> RenderableType:
    if not rows:
        return Text("No process has reported a socket yet.", "dim")
    table = plain_table()
    table.add_column("process", no_wrap=True)
    table.add_column("socket", no_wrap=True)
    for header in ("messages in", "bytes in", "messages out", "bytes out", "refused"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.process,
            row.socket,
            number(row.received_messages),
            size(row.received_bytes),
            number(row.sent_messages),
            size(row.sent_bytes),
            Text(number(row.refused_sends), "red" if row.refused_sends else ""),
        )
    return table


def sockets(
    *,
    target: Target = DEFAULT_TARGET,
    output: Output = DEFAULT_OUTPUT,
) -> None:
    """Show the traffic of every ZeroMQ socket since its process started.

    *refused* counts attempts to send that failed because the peer was gone or did not read; what must arrive
    is tried again.
    """
    Inspection("sockets", list[SocketRow], sockets_table).run(target, output)
