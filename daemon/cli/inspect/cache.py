"""`deepinfer inspect cache`."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from daemon.cli.inspect.session import DEFAULT_OUTPUT, Inspection, Output, plain_table
from daemon.cli.target import DEFAULT_TARGET, Target
from daemon.cli.units import UNKNOWN, number
from daemon.report_types import CacheRow

BAR_CELLS = 14
_PARTS = " ▏▎▍▌▋▊▉█"


def cache_table(rows: list[CacheRow]) -> RenderableType:
    """One line per rank."""
    if not rows:
        return Text("This instance has no workers.", "dim")
    table = plain_table()
    table.add_column("rank", justify="right")
    table.add_column("pages in use", no_wrap=True)
    for header in ("pages", "slots", "running", "waiting", "preempted"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row.rank),
            usage_bar(row.page_usage_ratio),
            _of(row.pages_used, row.pages_total),
            _of(row.slots_used, row.slots_total),
            number(row.sequences_running),
            number(row.sequences_waiting),
            number(row.preemptions),
        )
    return table


def usage_bar(ratio: float | None) -> Text:
    """A bar and its percentage; `ratio` is 0 to 1."""
    if ratio is None:
        return Text("not loaded yet", "dim")
    eighths = round(min(max(ratio, 0.0), 1.0) * BAR_CELLS * 8)
    full, rest = divmod(eighths, 8)
    bar = "█" * full + (_PARTS[rest] if rest else "")
    style = "green" if ratio < 0.7 else "yellow" if ratio < 0.9 else "red"
    return Text.assemble((bar.ljust(BAR_CELLS, "·"), style), f" {100 * ratio:3.0f} %")


def _of(used: int | None, total: int | None) -> str:
    if used is None or total is None:
        return UNKNOWN
    return f"{used:,} / {total:,}"


def cache(
    *,
    target: Target = DEFAULT_TARGET,
    output: Output = DEFAULT_OUTPUT,
) -> None:
    """Show the KV page pool and the sequence slots of each rank.

    *preempted* counts sequences that were set back because the pages ran out; if it grows, lower
    --max-num-seqs or enlarge the pool with --kv-cache-gb.
    """
    Inspection("cache", list[CacheRow], cache_table).run(target, output)
