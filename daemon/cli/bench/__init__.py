"""`deepinfer bench`: benchmarks of parts, each with a table and a file. One folder per command."""

from __future__ import annotations

from cyclopts import App

from daemon.cli.bench.engine import command as engine_command
from daemon.cli.bench.page_copy import command as page_copy_command

bench_app = App(name="bench", help="Measure a part of the system on this machine.")
bench_app.command(engine_command.engine)
bench_app.command(page_copy_command.page_copy)
