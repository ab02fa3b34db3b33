"""Shows how far the loading of weights is: a bar on a terminal, lines in the log elsewhere."""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_log = logging.getLogger(__name__)

_LINES: Final = 10


@contextmanager
def load_progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """A callback for (bytes done, bytes in all) that shows them under `title` while open."""
    if not sys.stderr.isatty():
        yield _LogLines(title)
        return
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _LogLines:
    """One line each time another tenth is done."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._told = 0

    def __call__(self, done: int, total: int) -> None:
        tenths = done * _LINES // total if total else _LINES
        if tenths > self._told:
            self._told = tenths
            _log.info("%s: %d %% of %.1f GB", self._title, tenths * 100 // _LINES, total / 1e9)
