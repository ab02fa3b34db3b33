"""`deepinfer bench`: benchmarks of parts, each with a table and a file. One folder per command."""

from __future__ import annotations

from cyclopts import App

from daemon.cli.bench.engine.command import engine
from daemon.cli.bench.page_copy.command import page_copy

bench_app = App(name="bench", help="Measure a part of the system on this machine.")
bench_app.command(engine)
bench_app.command(page_copy)
