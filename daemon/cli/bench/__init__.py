"""`deepinfer bench`: benchmarks of parts, each with a table and a file. One group of files per command."""

from __future__ import annotations

from cyclopts import App

from daemon.cli.bench.page_copy import page_copy

bench_app = App(name="bench", help="Measure a part of the system on this machine.")
bench_app.command(page_copy)
