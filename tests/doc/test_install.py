"""What is installed is what was tested."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def locked_versions() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pins}


def wanted() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [Requirement(text) for text in project["dependencies"]]


def test_the_locked_versions_are_allowed():
    locked = locked_versions()
    for requirement in wanted():
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)])


def test_a_package_whose_private_modules_are_used_is_bounded():
    (uvicorn,) = [requirement for requirement in wanted() if requirement.name == "uvicorn"]
    version = locked_versions()["uvicorn"]
    major, minor, _ = version.split(".")
    assert not uvicorn.specifier.contains(f"{major}.{int(minor) + 1}.0")


def test_each_install_of_the_manual_is_held_to_versions_that_pip_takes():
    manual = (ROOT / "doc/operations.md").read_text()
    commands = re.findall(r"^\S*pip install .*$", manual, re.MULTILINE)
    assert commands
    for command in commands:
        words = shlex.split(command, comments=True)
        constraints = ROOT / words[words.index("-c") + 1]
        pinned = {
            canonicalize_name(pin.name)
            for pin in map(Requirement, constraints.read_text().split("\n")[1:-1])
            # pip refuses constraints with extras, and those without a version hold nothing.
            if not pin.extras and [part.operator for part in pin.specifier] == ["=="]
        }
        assert {canonicalize_name(requirement.name) for requirement in wanted()} <= pinned
