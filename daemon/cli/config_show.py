"""`deepinfer config show`: the options and where each came from."""

from __future__ import annotations

from dataclasses import fields
from typing import Final

import msgspec
from cyclopts import App
from rich.table import Table

from daemon.cli.output import AsJson, print_json, table_console
from daemon.configuration.config import InstanceConfig
from daemon.configuration.sources import provenance

UNFOLDED_COLUMNS: Final = 10_000
"""A file or a pipe is as wide as the values need."""

config_app = App(name="config", help="Look at the configuration.")


@config_app.command
def show(config: InstanceConfig | None = None, *, json: AsJson = False) -> None:
    """Print every option, its value, and where the value comes from."""
    config = config or InstanceConfig()
    console = table_console(UNFOLDED_COLUMNS)
    if json:
        values = {
            field.name: {
                "value": getattr(config, field.name),
                "from": provenance.origin(field.name),
            }
            for field in fields(config)
        }
        print_json(console, msgspec.json.encode(values, enc_hook=str))
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("option", no_wrap=True)
    for header in ("value", "from"):
        table.add_column(header, overflow="fold")
    for field in fields(config):
        value, origin = getattr(config, field.name), provenance.origin(field.name)
        table.add_row(
            "--" + field.name.replace("_", "-"),
            "(not set)" if value is None else str(value),
            origin,
            style="dim" if origin == "default" else "bold",
        )
    console.print(table)
