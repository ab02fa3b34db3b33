"""What all `inspect` commands have in common: their options, asking once or every second."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final, Generic, TypeVar

import msgspec
from cyclopts import Parameter
from rich.console import Console, RenderableType
from rich.live import Live

from daemon.cli.output import print_json, table_console
from daemon.cli.target import Target
from daemon.inspection.inspection_client import InspectionClient

ASK_SECONDS: Final = 5.0
REFRESH_SECONDS: Final = 1.0


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Output:
    """How an answer is shown."""

    json: Annotated[
        bool,
        Parameter(
            negative="",
            show_env_var=False,
            show_default=False,
            help="Print JSON; with --follow, one line per refresh.",
        ),
    ] = False
    follow: Annotated[
        bool,
        Parameter(
            negative="",
            show_env_var=False,
            show_default=False,
            help="Refresh once a second until Ctrl-C.",
        ),
    ] = False


DEFAULT_OUTPUT: Final = Output()

ReportT = TypeVar("ReportT")


def _ask(client: InspectionClient, question: str) -> bytes:
    return client.ask(question, ASK_SECONDS)


@dataclass(frozen=True)
class Inspection(Generic[ReportT]):
    """One question, and how its answer is shown."""

    question: str
    report_type: type[ReportT]
    render: Callable[[ReportT], RenderableType]
    ask: Callable[[InspectionClient, str], bytes] = _ask
    """Gets the answer to the question."""

    def run(self, target: Target, output: Output, console: Console | None = None) -> None:
        """Ask and show.

        Raises:
            DeepInferError: the instance does not run, or its daemon does not answer.
        """
        console = console or table_console()
        try:
            with InspectionClient(target.find(), target.instance) as client:
                if not output.follow:
                    self._once(client, output.json, console)
                elif output.json or not console.is_terminal:
                    self._append(client, output.json, console)
                else:
                    self._redraw(client, console)
        except KeyboardInterrupt:
            if not output.follow:
                raise
        except BrokenPipeError:
            console.on_broken_pipe()  # ends quietly: whoever read this has had enough

    def _once(self, client: InspectionClient, as_json: bool, console: Console) -> None:
        answer = self.ask(client, self.question)
        if as_json:
            print_json(console, answer)
        else:
            console.print(self._rendered(answer))
        console.file.flush()

    def _append(self, client: InspectionClient, as_json: bool, console: Console) -> None:
        while True:
            answer = self.ask(client, self.question)
            if as_json:
                console.file.write(answer.decode() + "\n")
            else:
                console.print(self._rendered(answer), end="\n\n")
            console.file.flush()
            time.sleep(REFRESH_SECONDS)

    def _redraw(self, client: InspectionClient, console: Console) -> None:
        first = self._rendered(self.ask(client, self.question))
        with Live(first, console=console, auto_refresh=False) as live:
            while True:
                time.sleep(REFRESH_SECONDS)
                live.update(self._rendered(self.ask(client, self.question)), refresh=True)

    def _rendered(self, answer: bytes) -> RenderableType:
        return self.render(msgspec.json.decode(answer, type=self.report_type))
