"""A built wheel is complete: it serves, far from the sources."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

import pytest

from tests.support.instance import JSON_TYPE, environment

ROOT = Path(__file__).parents[2]
BUILT_FROM = (
    "csrc", "daemon", "frontend", "hicache", "systemd", "transport", "workers",
    "pyproject.toml", "README.md", "LICENSE",
)  # fmt: skip
HERE_ALONE = "import daemon.cli.main as m; print(m.__file__); m.main()"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder with what the wheel holds."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # setuptools writes a build folder into what it builds
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source)
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, source],
        check=False, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


@pytest.fixture
def installed(site, tmp_path):
    """installed("serve", …): the wheel's command under way, in a folder of its own."""
    running: list[subprocess.Popen[str]] = []

    def run(*arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HERE_ALONE, *map(str, arguments)],
            cwd=tmp_path, env=environment({"PYTHONPATH": str(site)}), text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        running.append(process)
        return process

    yield run
    for process in running:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_built_wheel_helps_and_holds_the_files_of_systemd(installed, site, tmp_path):
    output, errors = installed("--help").communicate(timeout=60)
    assert output.startswith(str(site)), "it ran something else"
    assert "Usage: deepinfer" in output, errors
    root = tmp_path / "root"
    words = ("systemd", "install", "--root", root, "--executable", "/opt/x/deepinfer")
    output, errors = installed(*words).communicate(timeout=60)
    units = root / "usr/local/lib/systemd/system"
    assert "ExecStart=/opt/x/deepinfer serve" in (units / "deepinfer@.service").read_text(), errors
    assert sum(path.is_file() for path in root.rglob("*")) == 6


@pytest.mark.slow
def test_a_built_wheel_serves(installed, site, tiny_dir, short_dir):
    run_dir = short_dir / "run"
    process = installed(
        "serve", "--engine", "fake", "--model", tiny_dir, "--run-dir", run_dir, "--port", 0
    )
    assert process.stdout is not None
    lines: list[str] = []
    while not lines or " is ready at " not in lines[-1]:
        line = process.stdout.readline()
        assert line, process.communicate()
        lines.append(line)
    url = re.search(r"http://[\d.:]+", lines[-1])
    assert url is not None
    asked = urllib.request.Request(
        f"{url.group()}/v1/completions", b'{"prompt": "hello", "max_tokens": 2}', JSON_TYPE
    )
    with urllib.request.urlopen(asked, timeout=60) as reply:
        assert reply.status == 200
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert not run_dir.exists()
