"""How commands print: sentences, tables and JSON."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Annotated, Final

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from daemon.errors import DeepInferError
from daemon.system.standard_output import StandardOutput

FILE_COLUMNS: Final = 120

AsJson = Annotated[
    bool,
    Parameter(negative="", show_env_var=False, show_default=False, help="Print JSON."),
]


def sentence_console(*, stderr: bool = False) -> Console:
    """For sentences, which the terminal folds where it likes."""
    return Console(stderr=stderr, soft_wrap=True, highlight=False)


def print_error(error: DeepInferError) -> None:
    """Once, however many ask for it."""
    if error.is_printed:
        return
    error.is_printed = True
    sentence_console(stderr=True).print(f"deepinfer: {error}", style="red", markup=False)


@contextlib.contextmanager
def unfailing_output() -> Iterator[StandardOutput]:
    """For commands that are about an instance and not about what they print, which may get lost: nobody
    waits for who does not read it. Their errors are printed in here, too."""
    with StandardOutput() as output:
        try:
            yield output
        except DeepInferError as error:
            print_error(error)
            raise


def table_console(file_columns: int = FILE_COLUMNS) -> Console:
    """For tables: as wide as the terminal, or `file_columns` into a file or a pipe."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = file_columns
    return console


def print_json(console: Console, answer: bytes) -> None:
    console.file.write(msgspec.json.format(answer.decode(), indent=2) + "\n")
    console.file.flush()


def plain_table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
