"""`deepinfer status`: is the instance alive, and does it serve?"""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
from cyclopts import Parameter

from daemon.cli.inspect.session import ASK_SECONDS
from daemon.cli.output import sentence_console
from daemon.cli.target import DEFAULT_TARGET, Target
from daemon.errors import EXIT_FAILED
from daemon.inspection.inspection_client import InspectionClient
from daemon.inspection.report_types import StatusReport


def status(
    *,
    target: Target = DEFAULT_TARGET,
    json: Annotated[bool, Parameter(help="Print the answer as JSON.")] = False,
) -> None:
    """Say whether the instance runs and serves. Exit code 0: it serves; 1: it does not."""
    path = target.find()
    with InspectionClient(path, target.instance) as client:
        answer = client.ask("status", ASK_SECONDS)
    found = msgspec.json.decode(answer, type=StatusReport)
    console = sentence_console()
    if json:
        console.print(answer.decode(), markup=False)
    else:
        colour = "green" if found.state == "ready" else "yellow"
        console.print(
            f"[bold {colour}]{found.state}[/]  {found.instance}  {found.model} at {found.url}  "
            f"(process {found.pid}, up {found.uptime_seconds:.0f} s)"
        )
        if found.reason:
            console.print(found.reason, markup=False)
    if found.state != "ready":
        sys.exit(EXIT_FAILED)
