"""Which instance a command talks to: the options of all commands that talk to one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cyclopts import Parameter

from daemon.configuration.config import ConfigFile, InstanceName, RunDir
from daemon.system.run_directory import find_run_directory


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Target:
    """An instance, by name and place."""

    instance: InstanceName = "default"
    run_dir: RunDir = None
    config: ConfigFile = None
    """Read by the command line, for its --instance and --run-dir."""

    def find(self) -> Path:
        """The run directory of the instance.

        Raises:
            ConfigurationError: a socket path in it would be too long.
            DeepInferError: the directory belongs to another user.
        """
        return find_run_directory(self.instance, self.run_dir)


DEFAULT_TARGET: Final = Target()
