"""`deepinfer systemd install`: make instances services of this machine."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Annotated, Final

from cyclopts import Parameter
from rich.console import Console

from daemon.cli.output import sentence_console
from daemon.errors import ConfigurationError, DeepInferError
from daemon.system.unit_files import (
    DEFAULT_PREFIX,
    cannot_write,
    closed_directory,
    own_executable,
    unit_files,
)

COMMAND_SECONDS: Final = 60.0
_RUNNING_SYSTEMD: Final = Path("/run/systemd/system")

Root = Annotated[
    Path,
    Parameter(
        show_env_var=False,
        help="Root directory of the system to change, such as an image. Nothing but its files is "
        "then touched.",
    ),
]
Prefix = Annotated[
    Path,
    Parameter(
        show_env_var=False,
        help="Units, users and temporary files go to PREFIX/lib: /usr/local, or /usr in a package.",
    ),
]


def install(
    *,
    root: Root = Path("/"),
    executable: Annotated[
        Path | None,
        Parameter(
            show_env_var=False, help="The `deepinfer` that the unit runs. Default: this one's."
        ),
    ] = None,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """Write the unit deepinfer@.service, its user, and example options to /etc/deepinfer.

    Run as root, again after each upgrade: it changes what is out of date and never a file in
    /etc/deepinfer that is there already. Change a unit with `systemctl edit`.
    """
    command = str(executable) if executable is not None else own_executable()
    if not prefix.is_absolute():
        raise ConfigurationError(f"--prefix {prefix} is no absolute path: give one.")
    console = sentence_console()
    for file in unit_files(root, prefix, command):
        try:
            outcome = file.install()
        except OSError as error:
            raise cannot_write(file.path, error) from error
        why = "  (it differs from ours, and is yours)" if outcome == "kept" else ""
        console.print(f"{outcome:10}{file.path}{why}", markup=False)
    if root.resolve() == Path("/"):
        if shutil.which("systemd-sysusers"):
            run_tool("systemd-sysusers", "deepinfer.conf")
            run_tool("systemd-tmpfiles", "--create", "deepinfer.conf")
        reload_systemd()
        _warn(console, command)
    console.print("\nNext: systemctl start deepinfer@default")


def _warn(console: Console, command: str) -> None:
    closed = closed_directory(command)
    if closed is not None:
        console.print(
            f"\nUser deepinfer cannot run {command}, because {closed} is closed to it: install "
            f"DeepInfer elsewhere, or open it with `chmod o+x {closed}`.",
            style="yellow",
            markup=False,
        )
    if not _RUNNING_SYSTEMD.is_dir():
        console.print("\nsystemd does not run here: the files are for the next boot.")


def reload_systemd() -> None:
    """Tell a running systemd of changed units.

    Raises:
        DeepInferError: it refuses.
    """
    if _RUNNING_SYSTEMD.is_dir():
        run_tool("systemctl", "daemon-reload")


def run_tool(*words: str) -> None:
    """Run one of systemd's tools.

    Raises:
        DeepInferError: it is missing or fails; with what it said.
    """
    command = " ".join(words)
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DeepInferError(
            f"`{command}` does not work ({error}): run it by hand, then this again."
        ) from error
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise DeepInferError(f"`{command}` failed: {said}")
