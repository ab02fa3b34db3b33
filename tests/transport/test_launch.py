"""Processes import from Python's path and from this tree, never from the working directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from transport import launch

SECONDS = 60.0


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A directory whose modules must not be imported: each leaves a file `ran`."""
    folder = tmp_path / "trap"
    folder.mkdir()
    for name in ("queue", "ctypes", "msgspec", "numpy", "setproctitle", "pip"):
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    return folder


@pytest.mark.parametrize("python_path", ["", ".", ":", "/none:", "trap:"])
def test_a_process_does_not_import_from_the_working_directory(trap, python_path):
    environment = launch.launch_environment({**os.environ, "PYTHONPATH": python_path})
    command = launch.python_command("transport.child")
    subprocess.run(command, cwd=trap, env=environment, check=True, timeout=SECONDS)
    assert not (trap.parent / "ran").exists()


def test_entries_of_the_path_that_stand_for_themselves_stay():
    kept = launch.launch_environment({"PYTHONPATH": "/a::b:/c", "HOME": "/h"})
    assert kept == {"PYTHONPATH": "/a:/c", "HOME": "/h"}


def test_a_tree_that_is_not_on_the_path_is_found(tmp_path):
    tree = tmp_path / "tree" / "transport"
    tree.mkdir(parents=True)
    script = shutil.copy(launch.__file__, tree)
    (tmp_path / "tree" / "hello.py").write_text("import sys; print(__name__, sys.argv[1:])")
    words = [sys.executable, "-P", script, "hello", "a", "b"]
    said = subprocess.run(
        words, cwd="/", capture_output=True, text=True, check=True, timeout=SECONDS
    )
    assert said.stdout == "__main__ ['a', 'b']\n"
