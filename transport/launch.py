"""Runs a module of this tree: `python -P transport/launch.py MODULE [ARGUMENT ...]`.

`python -m` would look for every module, those of the standard library included, in the working
directory first, which may be anybody's. Here modules come from Python's own path and from this tree.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping

_FILE = os.path.abspath(__file__)  # noqa: PTH100  pathlib takes longer to import than this file to run
_TREE = os.path.dirname(os.path.dirname(_FILE))  # noqa: PTH120


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that runs `module` with `launch_environment`, whatever the working directory."""
    return [sys.executable, "-P", _FILE, module, *arguments]


def launch_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without the entries of PYTHONPATH that mean the working directory, as an empty one
    does, or lie below it."""
    kept = dict(environment)
    entries = kept.pop("PYTHONPATH", "").split(os.pathsep)
    if absolute := [entry for entry in entries if os.path.isabs(entry)]:  # noqa: PTH117
        kept["PYTHONPATH"] = os.pathsep.join(absolute)
    return kept


def main() -> None:
    if _TREE not in sys.path:
        sys.path.insert(0, _TREE)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
