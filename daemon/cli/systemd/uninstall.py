"""`deepinfer systemd uninstall`: take back what `install` wrote."""

from __future__ import annotations

import subprocess
from pathlib import Path

from daemon.cli.output import sentence_console
from daemon.cli.systemd.install import (
    COMMAND_SECONDS,
    Prefix,
    Root,
    reload_systemd,
)
from daemon.errors import DeepInferError
from daemon.system.unit_files import DEFAULT_PREFIX, cannot_write, unit_files


def uninstall(*, root: Root = Path("/"), prefix: Prefix = DEFAULT_PREFIX) -> None:
    """Remove what `install` wrote. Edited options, the user and the default model stay."""
    is_here = root.resolve() == Path("/")
    running = _running_units() if is_here else []
    if running:
        raise DeepInferError(
            f"{', '.join(running)} still runs: stop it with `systemctl stop 'deepinfer@*'`."
        )
    console = sentence_console()
    for file in unit_files(root, prefix, "/usr/bin/deepinfer"):
        try:
            outcome = file.uninstall()
        except OSError as error:
            raise cannot_write(file.path, error) from error
        why = "  (you have edited it)" if outcome == "kept" else ""
        console.print(f"{outcome:10}{file.path}{why}", markup=False)
    if is_here:
        reload_systemd()


def _running_units() -> list[str]:
    try:
        listed = subprocess.run(
            ("systemctl", "list-units", "--plain", "--no-legend", "--state=active,activating,"
             "deactivating,reloading", "deepinfer@*"),
            capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False,
        )  # fmt: skip
    except OSError:
        return []
    return [line.split()[0] for line in listed.stdout.splitlines() if line.strip()]
