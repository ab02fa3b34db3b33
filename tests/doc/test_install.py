"""What is installed is what was tested."""

from __future__ import annotations

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


def test_the_manual_installs_the_locked_versions():
    assert "pip install -c requirements.lock ." in (ROOT / "doc/operations.md").read_text()
