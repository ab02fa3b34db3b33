"""`deepinfer top`: a live view of an instance in the terminal."""

from __future__ import annotations

import time
from typing import Annotated, Final

import msgspec
from cyclopts import Parameter
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from daemon.cli.inspect.cache import cache_table
from daemon.cli.inspect.processes import STATE_STYLES, processes_table
from daemon.cli.inspect.requests import requests_table
from daemon.cli.throughput import Rates, Throughput
from daemon.cli.units import duration, rate
from daemon.config import ConfigFile, InstanceName, RunDir
from daemon.inspection_client import InspectionClient
from daemon.report_types import StateReport, StatusReport
from daemon.run_directory import choose_run_directory

ASK_SECONDS: Final = 5.0
REFRESH_SECONDS: Final = 1.0
FIXED_LINES: Final = 12
"""Header, throughput, headings and blank lines."""
FEWEST_REQUESTS: Final = 3


def top(
    *,
    instance: InstanceName = "default",
    run_dir: RunDir = None,
    config: ConfigFile = None,
    once: Annotated[
        bool, Parameter(negative="", help="Print one frame, measured over a second, and exit.")
    ] = False,
) -> None:
    """Watch an instance: throughput, processes, KV pages and the oldest requests.

    Refreshes once a second; Ctrl-C ends it. Prompt and generation count the tokens that the workers
    compute, as the mean of the last five seconds.
    """
    del config  # read by the command line, for its --instance and --run-dir
    console = Console(highlight=False)
    path = choose_run_directory(instance, run_dir)
    throughput = Throughput()
    with InspectionClient(path, instance) as client:
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
    """One picture of the instance that fits into `height` lines (None: as long as it gets)."""
    most = None
    if height is not None:
        used = FIXED_LINES + len(state.processes) + len(state.cache)
        most = max(height - used, FEWEST_REQUESTS)
    requests = state.status.requests
    live = requests.received + requests.tokenizing + requests.queued + requests.running
    return Group(
        _header(state.status),
        Text(),
        _throughput(state.status, rates),
        Text(),
        processes_table(state.processes),
        Text(),
        cache_table(state.cache),
        Text(),
        Text(f"requests: {live:,}, oldest first" if state.requests else "requests", "bold"),
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
    reason = [Text(status.reason, "yellow")] if status.reason else []
    return Group(line, where, *reason)


def _throughput(status: StatusReport, rates: Rates) -> RenderableType:
    requests = status.requests
    waiting = requests.received + requests.tokenizing + requests.queued
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_row(
        _figure(rate(rates.prompt_tokens), "prompt tok/s"),
        _figure(rate(rates.generation_tokens), "generation tok/s"),
        _figure(rate(rates.requests), "req/s"),
        _figure(f"{requests.running:,}", "running"),
        _figure(f"{waiting:,}", "waiting"),
        _figure(f"{status.ranks_ready}/{status.ranks}", "ranks ready"),
    )
    return table


def _figure(value: str, unit: str) -> Text:
    return Text.assemble((value, "bold"), " ", (unit, "dim"))
