"""What `inspect stacks` and `inspect log-level` have in common: tell processes, show what they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final

import msgspec
from cyclopts import Parameter
from rich.console import RenderableType

from daemon.cli.output import print_json, table_console
from daemon.cli.target import Target
from daemon.errors import DeepInferError
from daemon.inspection.inspection_client import InspectionClient
from daemon.inspection.report_types import CommandReport
from transport.messages.control import ProcessCommand

COMMAND_SECONDS: Final = 8.0
"""More than the daemon waits for its processes."""

Process = Annotated[
    str,
    Parameter(
        show_env_var=False,
        show_default=False,
        help="Such as daemon, router, worker/0; `inspect processes` lists them. Default: all.",
    ),
]


def carry_out(
    command: ProcessCommand,
    render: Callable[[list[CommandReport]], RenderableType],
    target: Target,
    as_json: bool,
) -> None:
    """Give the command and show what came of it.

    Raises:
        DeepInferError: the instance does not run, or not every process has answered.
    """
    with InspectionClient(target.find(), target.instance) as client:
        answer = client.command(command, COMMAND_SECONDS)
    reports = msgspec.json.decode(answer, type=list[CommandReport])
    console = table_console()
    if as_json:
        print_json(console, answer)
    else:
        console.print(render(reports), soft_wrap=True)
        console.file.flush()
    silent = [report for report in reports if report.problem]
    if silent:
        names = ", ".join(report.process for report in silent)
        raise DeepInferError(
            f"{len(silent)} of {len(reports)} processes did not answer ({names}): "
            f"{silent[0].problem}."
        )
