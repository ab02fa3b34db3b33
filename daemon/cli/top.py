"""`deepinfer top`: a live view of an instance in the terminal."""

from __future__ import annotations

import time
from typing import Annotated, Final

import msgspec
from cyclopts import Parameter
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from daemon.cli.inspect.cache import cache_view
from daemon.cli.inspect.processes import STATE_STYLES, processes_table
from daemon.cli.inspect.requests import requests_table
from daemon.cli.inspect.session import ASK_SECONDS, REFRESH_SECONDS
from daemon.cli.output import print_json, table_console
from daemon.cli.target import DEFAULT_TARGET, Target
from daemon.cli.throughput import Rates, Throughput
from daemon.cli.units import duration, rate
from daemon.inspection.inspection_client import InspectionClient
from daemon.inspection.report_types import StateReport, StatusReport

FIXED_LINES: Final = 11
"""Header, throughput, headings, blank lines and the count of what is hidden."""
FEWEST_REQUESTS: Final = 3


def top(
    *,
    target: Target = DEFAULT_TARGET,
    once: Annotated[
        bool,
        Parameter(
            negative="",
            show_env_var=False,
            show_default=False,
            help="Print one frame, measured over a second, and exit.",
        ),
    ] = False,
    json: Annotated[
        bool,
        Parameter(
            negative="",
            show_env_var=False,
            show_default=False,
            help="Print all that is known at one moment as JSON, and exit.",
        ),
    ] = False,
) -> None:
    """Watch an instance: throughput, processes, KV pages and the oldest requests.

    Refreshes once a second; Ctrl-C ends it. The token rates count what the workers compute, as the
    mean of the last five seconds.
    """
    console = table_console()
    path = target.find()
    throughput = Throughput()
    with InspectionClient(path, target.instance) as client:
        if json:
            print_json(console, client.ask("state", ASK_SECONDS))
            return
        state = _ask(client, throughput)
        if once:
            time.sleep(REFRESH_SECONDS)
            state = _ask(client, throughput)
            console.print(frame(state, throughput.rates(), None))
            return
        try:
            with Live(
                frame(state, throughput.rates(), console.height),
                console=console,
                screen=True,
                auto_refresh=False,
            ) as live:
                while True:
                    time.sleep(REFRESH_SECONDS)
                    state = _ask(client, throughput)
                    live.update(frame(state, throughput.rates(), console.height), refresh=True)
        except KeyboardInterrupt:
            return


def _ask(client: InspectionClient, throughput: Throughput) -> StateReport:
    state = msgspec.json.decode(client.ask("state", ASK_SECONDS), type=StateReport)
    throughput.add(state.status)
    return state


def frame(state: StateReport, rates: Rates, height: int | None) -> RenderableType:
    most = None
    if height is not None:
        used = FIXED_LINES + len(state.processes) + len(state.cache)
        most = max(height - used, FEWEST_REQUESTS)
    return Group(
        _header(state.status),
        _throughput(state.status, rates),
        Text(),
        processes_table(state.processes, one_line=True),
        Text(),
        cache_view(state.cache),
        Text(),
        requests_table(state.requests, most),
    )


def _header(status: StatusReport) -> RenderableType:
    line = Table.grid(expand=True)
    line.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    line.add_column(justify="right", no_wrap=True)
    line.add_row(
        Text.assemble(
            (status.instance, "bold"),
            "  ",
            (status.state, f"bold {STATE_STYLES.get(status.state, '')}"),
            f"  {status.model}",
        ),
        Text(f"up {duration(status.uptime_seconds)}"),
    )
    where = Text.assemble(status.url, f"  on {status.accelerator}", style="dim")
    reason = Text(status.reason, "yellow", no_wrap=True, overflow="ellipsis")
    return Group(line, where, reason)


def _throughput(status: StatusReport, rates: Rates) -> RenderableType:
    requests = status.requests
    waiting = requests.received + requests.tokenizing + requests.queued
    figures = (
        (rate(rates.prompt_tokens), "prompt tok/s"),
        (rate(rates.generation_tokens), "output tok/s"),
        (rate(rates.requests), "req/s"),
        (f"{requests.running:,}", "running"),
        (f"{waiting:,}", "waiting"),
        (f"{status.ranks_ready}/{status.ranks}", "ranks"),
    )
    line = Text(no_wrap=True, overflow="ellipsis")
    for value, unit in figures:
        line.append(value, "bold").append(f" {unit}   ", "dim")
    return line
