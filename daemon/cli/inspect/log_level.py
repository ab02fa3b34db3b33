"""`deepinfer inspect log-level`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter
from rich.console import RenderableType
from rich.text import Text

from daemon.cli.inspect.command import Process, carry_out
from daemon.cli.output import AsJson, plain_table
from daemon.cli.target import DEFAULT_TARGET, Target
from daemon.inspection.report_types import CommandReport
from transport.ids import ProcessName
from transport.logs import LogLevel
from transport.messages.control import SetLogLevel

Level = Annotated[LogLevel, Parameter(show_env_var=False, help="What is at least to be logged.")]


def log_level(
    level: Level,
    process: Process = "",
    /,
    *,
    target: Target = DEFAULT_TARGET,
    json: AsJson = False,
) -> None:
    """Change the log level of a process, or of all processes, while they run.

    A process that is started anew begins with the instance's --log-level again.
    """

    def render(reports: list[CommandReport]) -> RenderableType:
        table = plain_table()
        for header in ("process", "log level"):
            table.add_column(header, no_wrap=True)
        for report in reports:
            problem = f"no answer: {report.problem}"
            text = Text(problem, "red") if report.problem else Text(report.log_level)
            table.add_row(report.process, text)
        return table

    carry_out(SetLogLevel(level, 0, ProcessName(process)), render, target, json)
