"""`deepinfer inspect stacks`."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from daemon.cli.inspect.command import Process, carry_out
from daemon.cli.output import AsJson
from daemon.cli.target import DEFAULT_TARGET, Target
from daemon.inspection.report_types import CommandReport
from transport.ids import ProcessName
from transport.messages.control import DumpStacks
from transport.stacks import StackFrame, ThreadStack


def stacks_text(reports: list[CommandReport]) -> RenderableType:
    return Group(*(part for report in reports for part in _process(report)))


def _process(report: CommandReport) -> list[Text]:
    head = Text.assemble((report.process, "bold"), (f"  process {report.pid}", "dim"))
    if report.problem:
        return [head, Text(f"  no answer: {report.problem}\n", "red")]
    return [head, *(line for thread in report.threads for line in _thread(thread)), Text("")]


def _thread(thread: ThreadStack) -> list[Text]:
    number = "" if thread.native_id is None else f"  thread {thread.native_id}"
    head = Text.assemble("  ", (thread.name, "cyan"), (number, "dim"))
    return [head, *(_call(frame) for frame in thread.frames)]


def _call(frame: StackFrame) -> Text:
    place = f"    {frame.file}:{frame.line} {frame.function}"
    return Text.assemble(place, (f"  {frame.code}" if frame.code else "", "dim"))


def stacks(
    process: Process = "",
    /,
    *,
    target: Target = DEFAULT_TARGET,
    json: AsJson = False,
) -> None:
    """Show where every Python thread of a process is right now, or of all processes.

    Works while a main loop hangs: each process answers from a thread of its own. A process that
    cannot answer (stopped, or held up in native code) is named after two seconds with what the
    kernel says of it, and the exit code is 1. Values of variables are never shown.
    """
    command = DumpStacks(0, ProcessName(process))
    carry_out(command, stacks_text, target, json)
