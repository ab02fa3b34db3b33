"""Shows how far the loading of weights is: a bar on a terminal, lines of text elsewhere."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LINE_SECONDS: Final = 5.0
"""Shortest time between two lines."""


@contextmanager
def load_progress(
    title: str, report: Callable[[str], None]
) -> Iterator[Callable[[int, int], None]]:
    """Yield a callback for (bytes done, bytes in all) that shows them under `title` while open.

    Where there is no terminal, `report` gets a line of text now and then.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(title, report)
        return
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _Lines:
    """Prints a line every few seconds, and none for what is done quickly."""

    def __init__(self, title: str, report: Callable[[str], None]) -> None:
        self._title = title
        self._report = report
        self._due = time.monotonic() + _LINE_SECONDS

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if total and now >= self._due:
            self._due = now + _LINE_SECONDS
            percent = done * 100 // total
            self._report(f"{self._title}: {percent} % of {total / 1e9:.1f} GB")
