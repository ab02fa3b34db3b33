"""Surroundings in which an instance cannot run: one sentence says why, and nothing is left."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

NOBODY = 65534
STRANGER = 54321
"""No user of this machine: no name, no home."""
WITHOUT_HOME = ("env", "-u", "HOME", "-u", "XDG_CACHE_HOME", "-u", "DEEPINFER_CACHE_DIR")
TEBI = 1 << 40
FEW_THREADS = 20
"""Enough for the daemon alone."""
READS_ALL = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
HIDE = 'mount -t tmpfs -o mode=000 tmpfs "$0" && exec setpriv --bounding-set=-all "$@"'
FULL = (
    'mount -t tmpfs -o size=64k tmpfs "$0" && { cat /dev/zero >"$0/fill" 2>/dev/null; exec "$@"; }'
)
ONLY_HERE = 'mount --bind "$0" "$0" && mount -o remount,bind,ro / && exec "$@"'

pytestmark = pytest.mark.slow

as_others = pytest.mark.usefixtures("other_users")


def as_user(uid: int) -> tuple[str, ...]:
    return ("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups")


@pytest.fixture(scope="session")
def other_users(cli) -> None:
    """Skips where we cannot act as another user, or where that one cannot run the command."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can act as another user, and with setpriv")
    if cli("serve", "--help", through=as_user(NOBODY)).returncode != 0:
        pytest.skip("other users may not read this installation")


@pytest.fixture(scope="session")
def in_mounts() -> Callable[[str, Path], tuple[str, ...]]:
    """in_mounts(script, folder): words that run a command behind mounts of its own; skips where
    nobody may make them."""
    if shutil.which("unshare") is None or shutil.which("setpriv") is None:
        pytest.skip("needs unshare and setpriv")
    tried = subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if tried.returncode:
        pytest.skip(f"no mounts of our own: {tried.stderr.strip()}")
    return lambda script, folder: ("unshare", "-rm", "sh", "-c", script, str(folder))


@pytest.fixture
def run_dir(short_dir: Path) -> Path:
    """Where anybody may make a run directory, as in /tmp."""
    short_dir.chmod(0o1777)
    return short_dir / "run"


@pytest.fixture
def refused(cli, tiny_dir, run_dir):
    """refused(*options): the sentence with which `serve` ended, having left nothing."""

    def serve(*options: object, through: tuple[str, ...] = (), **variables: str) -> str:
        # The first of two equal options would be an error: what a test gives replaces ours.
        defaults = {"--model": tiny_dir, "--run-dir": run_dir, "--port": 0, "--engine": "fake"}
        ours = [word for k, v in defaults.items() if k not in options for word in (k, v)]
        result = cli("serve", *ours, *options, through=through, **variables)
        assert result.returncode in (1, 2), result.stderr
        assert "Traceback" not in result.stderr
        sentences = [x for x in result.stderr.splitlines() if x.startswith("deepinfer: ")]
        assert len(sentences) == 1, result.stderr
        assert sentences[0].endswith("."), sentences
        assert not run_dir.exists()
        assert not mentioned_by_processes(str(run_dir))
        return sentences[0].removeprefix("deepinfer: ")

    return serve


def mentioned_by_processes(text: str) -> list[str]:
    found = psutil.process_iter(["cmdline"])
    return [" ".join(p.info["cmdline"] or ()) for p in found if text in (p.info["cmdline"] or ())]


# ---- the port and the host -------------------------------------------------------------------------


@pytest.mark.parametrize("reuse", [False, True])
def test_a_port_of_somebody_else_is_not_shared(refused, reuse):
    with socket.socket() as foreign:
        if reuse:
            foreign.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        foreign.bind(("127.0.0.1", 0))
        foreign.listen()
        port = foreign.getsockname()[1]
        sentence = refused("--port", port)
    assert f"Port {port} is already in use" in sentence
    assert "--port" in sentence


@as_others
def test_a_low_port_is_not_for_everybody(refused):
    first = int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text())
    if first <= 80:
        pytest.skip("this machine lets everybody open port 80")
    sentence = refused("--port", 80, through=as_user(NOBODY))
    assert "Port 80 may not be opened by this user" in sentence


@pytest.mark.parametrize("host", ["no-such-host.invalid", "203.0.113.7", "not a host"])
def test_a_host_that_is_not_here(refused, host):
    sentence = refused("--host", host)
    assert host in sentence
    assert "--host" in sentence


# ---- the run directory -----------------------------------------------------------------------------


def test_a_path_too_long_for_a_socket(refused, short_dir):
    folder = short_dir / ("d" * (100 - len(str(short_dir)) - 1))
    assert len(str(folder)) == 100
    sentence = refused("--run-dir", folder)
    assert "--run-dir" in sentence
    assert not folder.exists()


@as_others
def test_a_read_only_place(refused, short_dir):
    short_dir.chmod(0o555)
    sentence = refused(through=as_user(NOBODY))
    assert f"{short_dir / 'run'} cannot be used (permission denied)" in sentence
    assert "--run-dir" in sentence


def test_a_full_file_system(refused, run_dir, in_mounts):
    sentence = refused(through=in_mounts(FULL, run_dir.parent))
    assert f"The file system of the run directory {run_dir} is full (0 KiB" in sentence
    assert f"make room in {run_dir.parent}, or choose another one with --run-dir" in sentence


@as_others
def test_a_run_directory_of_another_user(refused, short_dir):
    folder = short_dir / "theirs"
    folder.mkdir(mode=0o755)
    os.chown(folder, STRANGER, STRANGER)
    for through in ((), as_user(NOBODY)):
        sentence = refused("--run-dir", folder, through=through)
        assert f"belongs to user {STRANGER}" in sentence
        assert "--run-dir" in sentence
    assert list(folder.iterdir()) == []


@as_others
def test_another_user_who_asks_is_told_at_once(cli, fake_server):
    fake_server.folder.chmod(0o755)
    where = ("--instance", fake_server.instance, "--run-dir", fake_server.run_dir)
    for command in (("status",), ("inspect", "processes"), ("stop",)):
        result = cli(*command, *where, through=as_user(NOBODY))
        assert result.returncode == 1
        assert "run this as its owner" in result.stderr
        assert "Traceback" not in result.stderr
    fake_server.ready()


@as_others
def test_a_missing_directory_for_temporary_files(cli, tiny_dir):
    missing = "/does-not-exist"
    result = cli(
        "serve", "--model", tiny_dir, "--port", 0, "--engine", "fake",
        through=("env", "-u", "XDG_RUNTIME_DIR", *as_user(NOBODY)), TMPDIR=missing,
    )  # fmt: skip
    assert result.returncode == 1
    assert result.stderr.startswith(f"deepinfer: The run directory {missing}/")
    assert "--run-dir" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_file_system_that_is_read_only_is_enough_but_for_the_run_directory(
    refused, cli, tiny_dir, run_dir, in_mounts
):
    elsewhere = run_dir.parent.with_name(f"{run_dir.parent.name}-other")
    through = in_mounts(ONLY_HERE, run_dir.parent)
    sentence = refused("--run-dir", elsewhere, through=through)
    assert f"{elsewhere} cannot be used (read-only file system)" in sentence
    assert "--run-dir" in sentence

    # With a run directory nothing else needs to be written: no home, no temporary file.
    where = ("--instance", "ro", "--run-dir", run_dir)
    options = ("--model", tiny_dir, "--port", 0, "--kv-cache-gb", 0.01)
    nowhere = {"HOME": "/does-not-exist", "TMPDIR": "/does-not-exist"}
    started = cli("start", *where, *options, through=through, **nowhere)
    try:
        assert started.returncode == 0, started.stderr
        log = (run_dir / "deepinfer.log").read_text()
        assert "Traceback" not in log and "does-not-exist" not in log, log
    finally:
        stopped = cli("stop", *where)
    assert stopped.returncode == 0, stopped.stderr
    assert not run_dir.exists()


# ---- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["/", "..", "", " ", "a\n", "-", "é", "x" * 120])
def test_names_that_are_no_names(cli, run_dir, name):
    result = cli("serve", f"--instance={name}", "--run-dir", run_dir, "--port", 0)
    assert result.returncode == 2, result.stderr
    assert "An instance name starts with a letter or digit" in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert not run_dir.exists()


# ---- the model and its cache -----------------------------------------------------------------------


@as_others
def test_no_home_for_the_default_model(refused):
    through = (*WITHOUT_HOME, *as_user(STRANGER))
    sentence = refused("--model", "SmolLM2-135M-Instruct", through=through)
    assert "no home directory" in sentence
    assert "DEEPINFER_CACHE_DIR" in sentence


def test_a_home_that_is_read_only(refused):
    home = Path("/proc/self")  # where nobody may make a directory, root included
    through = (*WITHOUT_HOME, f"HOME={home}")
    sentence = refused("--model", "SmolLM2-135M-Instruct", through=through)
    assert f"{home}/.cache/deepinfer/models" in sentence
    assert "DEEPINFER_CACHE_DIR" in sentence


@pytest.fixture
def model_dir(tiny_dir, short_dir):
    """A copy of the tiny model that everybody may read."""
    folder = short_dir / "model"
    shutil.copytree(tiny_dir, folder)
    folder.chmod(0o755)
    return folder


@as_others
@pytest.mark.parametrize("name", [".", "config.json", "tokenizer.json", "model.safetensors"])
def test_a_model_that_may_not_be_read(refused, model_dir, name):
    (model_dir / name).chmod(0)
    engine = "auto" if name == "model.safetensors" else "fake"
    sentence = refused("--model", model_dir, "--engine", engine, through=as_user(NOBODY))
    assert str(model_dir) in sentence
    assert "ermission denied" in sentence or "cannot be read" in sentence


def test_a_model_in_a_home_that_is_hidden(refused, model_dir, in_mounts):
    home = model_dir.parent / "home"
    (home / "me").mkdir(parents=True)
    model = model_dir.rename(home / "me" / "model")
    sentence = refused("--model", model, through=in_mounts(HIDE, home))
    assert str(model) in sentence
    assert "cannot be read by user" in sentence
    assert "directories above" in sentence


# ---- limits ----------------------------------------------------------------------------------------


def test_too_few_open_files(refused):
    sentence = refused(through=("prlimit", "--nofile=64:64"))
    assert sentence.startswith("Only 64 files may be open, but ")
    assert "ulimit -n" in sentence


def test_too_few_threads(refused, cli):
    through = (*as_user(STRANGER), *READS_ALL, "prlimit", f"--nproc={FEW_THREADS}:{FEW_THREADS}")
    if os.geteuid() != 0 or cli("serve", "--help", through=through).returncode != 0:
        pytest.skip("only root can act as a user without other processes, and with setpriv")
    sentence = refused(through=through)
    assert sentence.startswith(f"This user may have {FEW_THREADS} threads and has ")
    assert "ulimit -u" in sentence


def test_too_little_memory(refused, model_dir):
    entry = {"dtype": "F32", "shape": [TEBI // 4], "data_offsets": [0, TEBI]}
    header = json.dumps({"weight": entry}).encode()
    with (model_dir / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + TEBI)  # takes no room: the file is all hole
    sentence = refused("--model", model_dir, "--engine", "auto", "--dp", 2)
    assert "need 2048.0 GiB of memory for 2 workers" in sentence
    assert "are available" in sentence
