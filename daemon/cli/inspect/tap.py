"""`deepinfer inspect tap`."""

from __future__ import annotations

import datetime
from typing import Annotated

import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.text import Text

from daemon.cli.output import AsJson, sentence_console, table_console
from daemon.cli.target import DEFAULT_TARGET, Target
from daemon.cli.units import size
from daemon.inspection.report_types import TapReport
from daemon.inspection.tap_client import TapClient

MOST_IDS = 3
"""Requests of one message that a line names."""


def tap(
    *,
    process: Annotated[
        str, Parameter(show_env_var=False, help="Only what this process sends or gets.")
    ] = "",
    bodies: Annotated[
        bool,
        Parameter(
            negative="",
            show_env_var=False,
            help="Show also fields and payloads: the texts of users.",
        ),
    ] = False,
    count: Annotated[
        int | None,
        Parameter(
            show_env_var=False, validator=Number(gte=1), help="End after this many messages."
        ),
    ] = None,
    target: Target = DEFAULT_TARGET,
    json: AsJson = False,
) -> None:
    """Show the messages that pass the router: when, from, to, what, for which request, how large.

    What users wrote and what they are answered is shown only with --bodies, and long payloads only
    as far as their first 4096 bytes. The router publishes only while somebody taps, and does not
    wait for a tap that is too slow: how many messages such a tap has lost is shown where they are
    missing. A router that is started anew is tapped again, and a line on standard error says so.
    Ends with Ctrl-C, or after --count messages. With --json, one line per message.
    """
    console = table_console()
    try:
        with TapClient(target.find(), target.instance, bodies) as client:
            _show(client, console, process, count, json)
    except KeyboardInterrupt:
        pass  # the usual end
    except BrokenPipeError:
        console.on_broken_pipe()  # whoever read this has had enough


def _show(
    client: TapClient, console: Console, process: str, count: int | None, as_json: bool
) -> None:
    notes = sentence_console(stderr=True)
    shown = lost = 0
    while True:
        reports = client.take()
        for notice in client.notices():
            notes.print(f"deepinfer: {notice}", style="yellow")
        for report in reports:
            lost += report.lost
            if process and process not in (report.sender, report.receiver):
                continue
            whole = msgspec.structs.replace(report, lost=lost)
            lost = 0
            if as_json:
                console.file.write(msgspec.json.encode(whole).decode() + "\n")
            else:
                console.print(tap_text(whole), soft_wrap=True)
            shown += 1
            if count is not None and shown >= count:
                console.file.flush()
                return
        console.file.flush()


def tap_text(report: TapReport) -> Text:
    clock = datetime.datetime.fromtimestamp(report.at).strftime("%H:%M:%S.%f")[:-3]
    ids = " ".join(report.request_ids[:MOST_IDS])
    more = len(report.request_ids) - MOST_IDS
    text = Text()
    if report.lost:
        text.append(f"{report.lost:,} messages lost: this tap was too slow\n", "red")
    text.append(clock, "dim")
    text.append(f"  {report.sender:>12} → {report.receiver:<12} ")
    text.append(f"{report.message:<14}", "cyan")
    text.append(f" {size(report.header_bytes + report.payload_bytes):>9}  {ids}")
    if more > 0:
        text.append(f" and {more} more", "dim")
    if report.header is not None:
        # As literals: what users send must not reach the terminal's own language.
        text.append(f"\n    {report.header!r}", "dim")
    for payload in report.payload:
        text.append(f"\n    {payload!r}")
    return text
