"""What `deepinfer systemd install` writes, as systemd and the command line understand it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cyclopts import App
from cyclopts.config import Env

from daemon.cli.main import app
from daemon.configuration.config import InstanceConfig
from daemon.configuration.sources import InstanceFile
from daemon.errors import ConfigurationError, DeepInferError
from daemon.system.unit_files import EXAMPLES, closed_directory, quoted

ROOT = Path(__file__).parents[2]
UNIT = "usr/local/lib/systemd/system/deepinfer@.service"


def run(*words: object) -> None:
    """The command line in this process, which must not fail."""
    app(list(map(str, words)), exit_on_error=False, result_action="return_value")


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def executable(tmp_path) -> Path:
    path = tmp_path / "venv" / "deepinfer"
    path.parent.mkdir()
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def contents(root: Path) -> dict[str, str]:
    return {str(p.relative_to(root)): p.read_text() for p in root.rglob("*") if p.is_file()}


def settings(unit: Path) -> dict[str, str]:
    lines = (line for line in unit.read_text().splitlines() if "=" in line and line[0] != "#")
    return dict(line.split("=", 1) for line in lines)


def verify(unit: Path) -> None:
    """systemd has nothing to say about the unit. Its exit code alone would pass unknown keys."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed (Debian: apt-get install systemd)")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit.with_name("deepinfer@x.service"))],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_systemd_has_nothing_to_say_about_the_unit(root, executable):
    run("systemd", "install", "--root", root, "--executable", executable)
    verify(root / UNIT)
    text = (root / UNIT).read_text()
    (root / UNIT).write_text(text.replace("TasksMax", "TasksMost"))
    with pytest.raises(AssertionError, match="TasksMost"):
        verify(root / UNIT)


def test_the_service_may_do_little_and_what_it_may_is_explained():
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed (Debian: apt-get install systemd)")
    unit = ROOT / "systemd/deepinfer@.service"
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=20", "--json=short", unit],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    if "nrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze knows neither --offline nor --threshold")
    assert done.returncode == 0, done.stderr  # of ten: 2.0 at most
    exposed = {row["name"].split("=")[0] for row in json.loads(done.stdout) if not row["set"]}
    named = {name for name in exposed if name in unit.read_text()}
    assert named == exposed
    assert settings(unit)["LimitCORE"] == "0"


@pytest.mark.parametrize("folder", ["with space", "100%n", "a$b"])
def test_any_path_of_the_installation_works(root, tmp_path, folder):
    executable = tmp_path / folder / "deepinfer"
    executable.parent.mkdir()
    executable.write_text("#!/bin/sh\n")
    executable.chmod(0o755)
    run("systemd", "install", "--root", root, "--executable", executable)
    verify(root / UNIT)  # it looks for the executable
    assert settings(root / UNIT)["ExecStart"] == f"{quoted(str(executable))} serve --instance %i"


@pytest.mark.parametrize("path", ["/it's/deepinfer", '/quo"te/deepinfer', "bin/deepinfer"])
def test_a_path_that_systemd_cannot_run_is_refused(root, path):
    with pytest.raises(ConfigurationError, match="--executable"):
        run("systemd", "install", "--root", root, "--executable", path)
    assert not root.exists()


def test_the_unit_runs_this_installation(root):
    run("systemd", "install", "--root", root)
    started = settings(root / UNIT)["ExecStart"].split()[0]
    assert Path(started).is_file()
    assert Path(started).parent == Path(sys.executable).parent


def test_stopping_and_the_watchdog_leave_the_daemon_its_own_time(root):
    run("systemd", "install", "--root", root)
    unit, config = settings(root / UNIT), InstanceConfig()
    assert int(unit["TimeoutStopSec"].removesuffix("s")) > config.drain_timeout + 30
    assert int(unit["WatchdogSec"].removesuffix("min")) * 60 > 2 * config.stall_seconds


def test_installing_again_changes_nothing_and_keeps_edits(root, capsys):
    run("systemd", "install", "--root", root)
    first = contents(root)
    assert set(first) == {
        UNIT, "usr/local/lib/sysusers.d/deepinfer.conf", "usr/local/lib/tmpfiles.d/deepinfer.conf",
        "etc/deepinfer/default.toml", "etc/deepinfer/pe.toml", "etc/deepinfer/ce.toml",
    }  # fmt: skip
    capsys.readouterr()
    run("systemd", "install", "--root", root)
    assert contents(root) == first
    printed = capsys.readouterr().out
    assert printed.count("unchanged") == len(first)
    assert "systemctl start deepinfer@default" in printed
    edited = root / "etc/deepinfer/default.toml"
    edited.write_text("port = 1\n")
    (root / UNIT).write_text("an older version\n")
    run("systemd", "install", "--root", root)
    assert contents(root) == {**first, "etc/deepinfer/default.toml": "port = 1\n"}
    run("systemd", "uninstall", "--root", root)
    assert contents(root) == {"etc/deepinfer/default.toml": "port = 1\n"}
    run("systemd", "uninstall", "--root", root)


def test_a_package_installs_below_usr(root):
    run(
        "systemd",
        "install",
        "--root",
        root,
        "--prefix",
        "/usr",
        "--executable",
        "/usr/bin/deepinfer",
    )
    unit = root / "usr/lib/systemd/system/deepinfer@.service"
    assert unit.read_text() == (ROOT / "systemd/deepinfer@.service").read_text()


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_example_is_a_configuration(name, root, monkeypatch):
    monkeypatch.setenv("DEEPINFER_ACCELERATOR", "cpu")
    run("systemd", "install", "--root", root)
    source = InstanceFile(root / "etc/deepinfer")
    seen: list[InstanceConfig] = []
    probe = App(config=(Env("DEEPINFER_", command=False), source))

    @probe.default
    def take(config: InstanceConfig | None = None) -> None:
        seen.append(config or InstanceConfig())

    probe(["--instance", name], exit_on_error=False, result_action="return_value")
    assert seen[0].instance == name
    assert seen[0].port == {"default": 8888, "pe": 8889, "ce": 8890}[name]


def test_a_directory_closed_to_the_services_user_is_named(tmp_path):
    home = tmp_path / "home"
    executable = home / "bin" / "deepinfer"
    executable.parent.mkdir(parents=True)
    executable.write_text("#!/bin/sh\n")
    for directory in (tmp_path, *tmp_path.parents):
        if not directory.stat().st_mode & 0o001:
            # pytest's own folder is closed already: that is then the one named
            assert closed_directory(str(executable)) is not None
            return
    assert closed_directory(str(executable)) is None
    home.chmod(0o700)
    assert closed_directory(str(executable)) == home


def test_one_sentence_where_it_may_not_write(tmp_path):
    (tmp_path / "usr").write_text("a file in the way")
    with pytest.raises(DeepInferError, match=r"deepinfer@.service cannot be changed"):
        run("systemd", "install", "--root", tmp_path)
