"""`deepinfer check`: compare what a live server does in two ways. One file per command."""

from __future__ import annotations

from cyclopts import App

from daemon.cli.check.prefix_cache import prefix_cache

check_app = App(name="check", help="Check a live server by comparing two ways to the same answer.")
check_app.command(prefix_cache)
