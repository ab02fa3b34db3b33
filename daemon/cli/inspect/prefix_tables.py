"""The host prefix caches as `inspect cache` shows them."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from daemon.cli.inspect.usage_bar import part_of, usage_bar
from daemon.cli.output import plain_table
from daemon.cli.units import duration, number, percent
from daemon.inspection.report_types import CacheRow

SHOWN = 10


def prefix_tables(rows: list[CacheRow]) -> Iterator[RenderableType]:
    cached = [row for row in rows if row.host_pages_total]
    if cached:
        yield Text("\nprefix cache", "bold")
        yield _occupancy(cached)
    yield from _prefixes(rows)
    yield from _misses(rows)
    for row in rows:
        if row.problem:
            yield Text(f"\n{row.process} says nothing of its cache: {row.problem}", "red")


def _occupancy(rows: list[CacheRow]) -> RenderableType:
    table = plain_table()
    table.add_column("rank", justify="right")
    table.add_column("host pages in use", no_wrap=True)
    for header in ("pages", "states", "oldest", "hit rate"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        used, total = row.host_pages_used or 0, row.host_pages_total or 1
        table.add_row(
            str(row.rank),
            usage_bar(used / total),
            part_of(used, total),
            part_of(row.host_states_used, row.host_states_total) if row.host_states_total else "",
            duration(row.oldest_page_seconds) if used else "",
            percent(None if row.hit_ratio is None else 100 * row.hit_ratio),
        )
    return table


def _prefixes(rows: list[CacheRow]) -> Iterator[RenderableType]:
    uses = [
        (row.rank, use) for row in rows if row.prefix_cache for use in row.prefix_cache.top_prefixes
    ]
    if not uses:
        return
    uses.sort(key=lambda pair: -pair[1].tokens * pair[1].hits)
    table = plain_table()
    for header in ("rank", "tokens", "hits", "last used"):
        table.add_column(header, justify="right", no_wrap=True)
    for rank, use in uses[:SHOWN]:
        table.add_row(
            str(rank), number(use.tokens), number(use.hits), f"{duration(use.idle_seconds)} ago"
        )
    yield Text("\nprefixes that save most (tokens x hits)", "bold")
    yield table


def _misses(rows: list[CacheRow]) -> Iterator[RenderableType]:
    misses = [
        (row.rank, m) for row in rows if row.prefix_cache for m in row.prefix_cache.recent_misses
    ]
    if not misses:
        return
    misses.sort(key=lambda pair: pair[1].seconds_ago)
    table = plain_table()
    for header in ("rank", "when", "prompt", "hit", "had pages"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("why not more", no_wrap=True)
    # It gives way to the others.
    table.add_column("request", overflow="ellipsis", min_width=10)
    for rank, miss in misses[:SHOWN]:
        table.add_row(
            str(rank),
            f"{duration(miss.seconds_ago)} ago",
            number(miss.prompt_tokens),
            number(miss.hit_tokens),
            number(miss.matched_tokens),
            miss.reason,
            miss.request_id,
        )
    yield Text("\nthe last misses", "bold")
    yield table
