"""`deepinfer config show`: the options and where each came from."""

from __future__ import annotations

from dataclasses import fields

from cyclopts import App
from rich.console import Console
from rich.table import Table

from daemon.config import InstanceConfig
from daemon.config_sources import provenance

config_app = App(name="config", help="Look at the configuration.")


@config_app.command
def show(config: InstanceConfig | None = None) -> None:
    """Print every option, its value, and where the value comes from."""
    config = config or InstanceConfig()
    table = Table("option", "value", "from", box=None, pad_edge=False)
    for field in fields(config):
        origin = provenance.origin(field.name)
        value = getattr(config, field.name)
        table.add_row(
            "--" + field.name.replace("_", "-"),
            "(not set)" if value is None else str(value),
            origin,
            style="dim" if origin == "default" else "bold",
        )
    Console(highlight=False).print(table)
