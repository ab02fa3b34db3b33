"""`deepinfer inspect cache`."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec.structs import replace
from rich.console import Group, RenderableType
from rich.text import Text

from daemon.cli.inspect.prefix_tables import prefix_tables
from daemon.cli.inspect.session import ASK_SECONDS, DEFAULT_OUTPUT, Inspection, Output
from daemon.cli.inspect.usage_bar import part_of, usage_bar
from daemon.cli.output import plain_table
from daemon.cli.target import DEFAULT_TARGET, Target
from daemon.cli.units import number
from daemon.inspection.inspection_client import InspectionClient
from daemon.inspection.report_types import CacheRow, CommandReport
from transport.messages.control import CacheCommand

REPORT_SECONDS: Final = 8.0
"""More than the daemon waits for its workers."""


def cache_view(rows: list[CacheRow]) -> RenderableType:
    if not rows:
        return Text("This instance has no workers.", "dim")
    return Group(_page_pools(rows), *prefix_tables(rows))


def _page_pools(rows: list[CacheRow]) -> RenderableType:
    table = plain_table()
    table.add_column("rank", justify="right")
    table.add_column("pages in use", no_wrap=True)
    for header in ("pages", "slots", "running", "waiting", "preempted"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row.rank),
            usage_bar(row.page_usage_ratio),
            part_of(row.pages_used, row.pages_total),
            part_of(row.slots_used, row.slots_total),
            number(row.sequences_running),
            number(row.sequences_waiting),
            number(row.preemptions),
        )
    return table


def ask(client: InspectionClient, question: str) -> bytes:
    """What the daemon knows of each rank, joined with what each worker says of itself."""
    rows = msgspec.json.decode(client.ask(question, ASK_SECONDS), type=list[CacheRow])
    if not rows:
        return b"[]"
    answer = client.command(CacheCommand("report", 0), REPORT_SECONDS)
    reports = {r.process: r for r in msgspec.json.decode(answer, type=list[CommandReport])}
    for at, row in enumerate(rows):
        report = reports.get(row.process)
        if report is None:
            rows[at] = replace(row, problem="it is not running")
        else:
            rows[at] = replace(row, prefix_cache=report.cache, problem=report.problem)
    return msgspec.json.encode(rows)


def cache(
    *,
    target: Target = DEFAULT_TARGET,
    output: Output = DEFAULT_OUTPUT,
) -> None:
    """Show the KV page pool, the sequence slots and the host prefix cache of each rank.

    Of the prefix cache: how full it is, when its oldest page was last used, how many of the prompt
    tokens looked up were taken from it, which prefixes save most (tokens times hits) and why the last
    prompts missed. Texts are never shown. A worker that hangs is named after two seconds.

    *preempted* counts sequences that were set back because the pages ran out; if it grows, lower
    --max-num-seqs or enlarge the pool with --kv-cache-gb.
    """
    Inspection("cache", list[CacheRow], cache_view, ask).run(target, output)
