"""The files that make an instance a systemd service: what is written where, and how.

The sources are in the folder `systemd/`, which the package contains as data.
"""

from __future__ import annotations

import importlib.resources
import os
import shutil
import stat
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from daemon.errors import ConfigurationError, DeepInferError

UNIT: Final = "deepinfer@.service"
DEFAULT_PREFIX: Final = Path("/usr/local")
"""systemd looks there for units, users and temporary files; the distribution does not write there."""
CONFIG_DIR: Final = Path("/etc/deepinfer")
EXAMPLES: Final = ("default", "pe", "ce")
_PACKAGED_EXECUTABLE: Final = "/usr/bin/deepinfer"

Outcome = Literal["written", "unchanged", "kept", "removed", "absent"]


@dataclass(frozen=True)
class UnitFile:
    """One file to install."""

    path: Path
    """Where, `root` included."""
    text: str
    is_users: bool = False
    """Whether the administrator may edit it: then what is there stays."""

    def install(self) -> Outcome:
        """Write the file if need be.

        Raises:
            OSError: that is not possible.
        """
        try:
            there = self.path.read_text()
        except FileNotFoundError:
            there = None
        if there == self.text:
            return "unchanged"
        if there is not None and self.is_users:
            return "kept"
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        # Written aside, so that systemd never reads half a unit.
        new = self.path.with_name(f".{self.path.name}.new")
        new.write_text(self.text)
        new.chmod(0o644)
        new.replace(self.path)
        return "written"

    def uninstall(self) -> Outcome:
        """Remove the file, unless the administrator has edited it.

        Raises:
            OSError: that is not possible.
        """
        try:
            if self.is_users and self.path.read_text() != self.text:
                return "kept"
            self.path.unlink()
        except FileNotFoundError:
            return "absent"
        return "removed"


def unit_files(root: Path, prefix: Path, executable: str) -> list[UnitFile]:
    source = importlib.resources.files("daemon").joinpath("systemd_files")

    def text(*names: str) -> str:
        return source.joinpath(*names).read_text(encoding="utf-8")

    library = under(root, prefix) / "lib"
    config_dir = under(root, CONFIG_DIR)
    unit = text(UNIT).replace(_PACKAGED_EXECUTABLE, quoted(executable))
    return [
        UnitFile(library / "systemd/system" / UNIT, unit),
        UnitFile(library / "sysusers.d/deepinfer.conf", text("deepinfer.sysusers")),
        UnitFile(library / "tmpfiles.d/deepinfer.conf", text("deepinfer.tmpfiles")),
        *(
            UnitFile(config_dir / f"{name}.toml", text("examples", f"{name}.toml"), is_users=True)
            for name in EXAMPLES
        ),
    ]


def under(root: Path, path: Path) -> Path:
    return root / path.relative_to(path.anchor)


def quoted(executable: str) -> str:
    """As the first word of ExecStart=.

    Raises:
        ConfigurationError: systemd takes no such path.
    """
    if not executable.startswith("/") or any(c in executable for c in "'\"\\\n"):
        raise ConfigurationError(
            f"systemd cannot run {executable!r}: give an absolute path without quotes and "
            "backslashes with --executable."
        )
    word = executable.replace("%", "%%")
    return f'"{word}"' if " " in word else word


def own_executable() -> str:
    """The `deepinfer` of the Python environment that runs this.

    Raises:
        ConfigurationError: there is none.
    """
    beside = Path(sysconfig.get_path("scripts")) / "deepinfer"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("deepinfer")
    if found is None:
        raise ConfigurationError(
            f"There is no command `deepinfer` in {beside.parent}: name it with --executable."
        )
    return found


def closed_directory(executable: str) -> Path | None:
    """The first directory on the way to the program, or to the Python that runs it, that the
    service's user may not enter."""
    ways = [Path(executable)]
    if Path(executable).resolve() != Path(executable):
        ways.append(Path(executable).resolve())
    interpreter = Path(executable).with_name("python")
    if interpreter.exists():
        ways.append(interpreter.resolve())
    for way in ways:
        for directory in reversed(way.parents):
            if directory.is_dir() and not stat.S_IMODE(directory.stat().st_mode) & 0o001:
                return directory
    return None


def cannot_write(path: Path, error: OSError) -> DeepInferError:
    reason = (error.strerror or str(error)).lower()
    return DeepInferError(
        f"{path} cannot be changed ({reason}): run this as root, or give a directory with --root."
    )
