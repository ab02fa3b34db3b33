"""The run directory: one owner, right place, nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from daemon.cli.stop import stop
from daemon.cli.target import Target
from daemon.errors import ConfigurationError, DeepInferError
from daemon.system import run_directory
from daemon.system.process_start import boot_id, seconds_at_start
from daemon.system.run_directory import (
    CHILDREN_FILE,
    RunDirectory,
    already_running,
    choose_run_directory,
    find_run_directory,
    holds_lock,
    make_run_directory,
    not_running,
    running_pid,
)


@pytest.fixture
def run_path(tmp_path) -> Path:
    return tmp_path / "runs" / "a"


def test_the_lock_tells_who_runs(run_path):
    assert running_pid(run_path) is None
    directory = RunDirectory.lock(run_path, "a")
    assert running_pid(run_path) == os.getpid()
    assert run_path.stat().st_mode & 0o777 == 0o700
    directory.close()
    assert running_pid(run_path) is None
    assert not run_path.exists()


def test_a_directory_that_was_there_is_closed_to_others(run_path):
    run_path.mkdir(mode=0o755, parents=True)
    directory = RunDirectory.lock(run_path, "a")
    assert run_path.stat().st_mode & 0o777 == 0o700
    directory.close()


def test_a_second_owner_is_refused_and_disturbs_nothing(run_path):
    directory = RunDirectory.lock(run_path, "a")
    (run_path / "control.sock").touch()
    with pytest.raises(DeepInferError, match=rf"'a' is already running \(process {os.getpid()}\)"):
        RunDirectory.lock(run_path, "a")
    assert (run_path / "control.sock").exists()
    assert running_pid(run_path) == os.getpid()
    directory.close()


def test_closing_twice_is_harmless(run_path):
    directory = RunDirectory.lock(run_path, "a")
    directory.close()
    with RunDirectoryOf(run_path):
        directory.close()
        assert running_pid(run_path) == os.getpid()


def test_files_of_others_stay(run_path):
    run_path.mkdir(parents=True)
    (run_path / "notes").write_text("mine")
    (run_path / "router.sock").touch()
    directory = RunDirectory.lock(run_path, "a")
    assert not (run_path / "router.sock").exists()
    directory.close()
    assert [entry.name for entry in run_path.iterdir()] == ["notes"]


def test_the_socket_of_a_start_goes_with_the_process_that_waited_at_it(run_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    run_path.mkdir(parents=True)
    for pid in (ended.pid, os.getpid()):
        (run_path / f"n{pid}.sock").touch()
    RunDirectory.lock(run_path, "a").close()
    assert [entry.name for entry in run_path.iterdir()] == [f"n{os.getpid()}.sock"]


def test_sentences_name_the_instance_in_the_directory_and_how_to_reach_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    default, other = choose_run_directory("a", None), tmp_path / "other one"
    assert "`deepinfer start --instance a`" in not_running(default, "a")
    assert f"`deepinfer start --run-dir '{other}'`" in not_running(other, "default")
    with RunDirectoryOf(default):
        told = already_running(default, "a")
        assert "stop --instance a`, or start another one with --instance NAME" in told
    with RunDirectoryOf(other):
        told = already_running(other, "default")
        assert told.startswith(f"Instance 'a' is already running (process {os.getpid()})")
        assert f"stop --instance a --run-dir '{other}'`" in told


RECORD_AND_DIE = (
    "import os, sys; from pathlib import Path; from daemon.system.run_directory import RunDirectory\n"
    "d = RunDirectory.lock(Path(sys.argv[1]), 'a'); d.record_children([int(sys.argv[2])])\n"
    "os.kill(os.getpid(), 9)"
)


@pytest.mark.parametrize("hours", [0, -1, 24 * 365 * 10])
def test_a_killed_owner_frees_the_lock_and_its_children_are_ended(run_path, monkeypatch, hours):
    child = subprocess.Popen(["sleep", "1000"])
    words = [sys.executable, "-c", RECORD_AND_DIE, str(run_path), str(child.pid)]
    subprocess.run(words, check=False)
    assert (run_path / CHILDREN_FILE).exists()
    assert running_pid(run_path) is None
    # The machine's clock is set meanwhile: the kernel then tells another time of its boot.
    boot_time = psutil.boot_time()
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: boot_time + hours * 3600)
    directory = RunDirectory.lock(run_path, "a")
    assert child.wait(0) == -9
    assert not (run_path / CHILDREN_FILE).exists()
    directory.close()


@pytest.mark.parametrize(
    "boot, seconds_earlier", [(boot_id(), 10.0), ("another boot", 0.0)], ids=["later", "rebooted"]
)
def test_a_stranger_with_a_recorded_pid_is_left_alone(run_path, boot, seconds_earlier):
    run_path.mkdir(parents=True, mode=0o700)
    with subprocess.Popen(["sleep", "1000"]) as stranger:
        row = [stranger.pid, seconds_at_start(stranger.pid) - seconds_earlier]
        (run_path / CHILDREN_FILE).write_text(json.dumps({"boot": boot, "children": [row]}))
        RunDirectory.lock(run_path, "a").close()
        assert stranger.poll() is None
        stranger.kill()


@pytest.mark.parametrize("text", ["", "[", "[[1, 2.0]]", "null", '{"boot": 1}'])
def test_a_damaged_record_of_children_is_none(run_path, text):
    run_path.mkdir(parents=True, mode=0o700)
    (run_path / CHILDREN_FILE).write_text(text)
    RunDirectory.lock(run_path, "a").close()


@contextlib.contextmanager
def no_room() -> Iterator[None]:
    """The kernel refuses to write to files, as where the file system is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_directory_that_cannot_be_written_is_one_sentence_and_leaves_nothing(run_path):
    with (
        no_room(),
        pytest.raises(DeepInferError, match=r"cannot be used \(file too large\): .*run-dir"),
    ):
        RunDirectory.lock(run_path, "a")
    assert not run_path.exists()
    RunDirectory.lock(run_path, "a").close()


def test_children_that_cannot_be_recorded_are_a_warning(run_path, caplog):
    directory = RunDirectory.lock(run_path, "a")
    with no_room():
        directory.record_children([os.getpid()])
    assert [r.getMessage() for r in caplog.records] == [
        f"{run_path} cannot be written (File too large): make room in it"
    ]
    directory.close()
    assert not run_path.exists()


@pytest.mark.parametrize("free", [{"f_bavail": 15}, {"f_favail": 3}], ids=["bytes", "files"])
def test_a_full_file_system_is_known_before_anything_is_made(run_path, monkeypatch, free):
    found = {
        "f_frsize": 4096,
        "f_bavail": 1000,
        "f_favail": 100,
        "f_blocks": 9,
        "f_files": 9,
    } | free
    monkeypatch.setattr(os, "statvfs", lambda place: SimpleNamespace(**found))
    with pytest.raises(
        DeepInferError, match=rf"full \(.*: make room in {run_path.parents[1]}, or "
    ):
        make_run_directory(run_path)
    assert not run_path.parent.exists()


def test_a_file_system_without_limits_is_not_full(run_path, monkeypatch):
    """Such as tmpfs with size=0,nr_inodes=0."""
    found = dict.fromkeys(("f_bavail", "f_favail", "f_blocks", "f_files"), 0) | {"f_frsize": 4096}
    monkeypatch.setattr(os, "statvfs", lambda place: SimpleNamespace(**found))
    make_run_directory(run_path)
    assert run_path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_a_directory_that_another_user_has_prepared_is_not_entered(tmp_path, monkeypatch):
    victims = tmp_path / "precious"
    victims.mkdir(mode=0o755)
    for name in ("lock", "instance", "deepinfer.log", "children.json"):
        (victims / name).write_text("precious")
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(shared))
    prepared = shared / "deepinfer-0"
    prepared.mkdir(mode=0o755)
    (prepared / "default").symlink_to(victims)
    os.lchown(prepared / "default", 54321, 54321)
    os.chown(prepared, 54321, 54321)

    with pytest.raises(DeepInferError, match=r"belongs to user 54321: .*--run-dir"):
        RunDirectory.lock(prepared / "default", "default")
    with pytest.raises(DeepInferError, match=r"belongs to user 54321: .*its owner"):
        running_pid(prepared / "default")
    assert victims.stat().st_mode & 0o777 == 0o755
    assert {entry.read_text() for entry in victims.iterdir()} == {"precious"}
    assert len(list(victims.iterdir())) == 4


def test_a_link_is_no_run_directory(tmp_path):
    (tmp_path / "precious").mkdir(mode=0o755)
    (tmp_path / "run").symlink_to("precious")
    with pytest.raises(DeepInferError, match=r"is a link: .*--run-dir"):
        RunDirectory.lock(tmp_path / "run", "a")
    assert (tmp_path / "precious").stat().st_mode & 0o777 == 0o755
    with pytest.raises(DeepInferError, match="is a link"):
        running_pid(tmp_path / "run")


def test_stop_leaves_a_process_alone_that_is_not_the_daemon_of_the_directory(run_path):
    with RunDirectoryOf(run_path), subprocess.Popen(["sleep", "1000"]) as stranger:
        (run_path / "daemon.pid").write_text(f"{stranger.pid}\n")
        try:
            with pytest.raises(DeepInferError, match=rf"Process {stranger.pid}.*is not the daemon"):
                stop(target=Target(run_dir=run_path), drain_timeout=0.0)
            assert stranger.poll() is None
        finally:
            stranger.kill()


def test_the_daemon_of_a_directory_is_known_by_its_lock(run_path):
    with RunDirectoryOf(run_path):
        assert holds_lock(os.getpid(), run_path)
        with subprocess.Popen(["sleep", "1000"]) as child:
            assert not holds_lock(child.pid, run_path)
            child.kill()
    assert not holds_lock(os.getpid(), run_path)


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DeepInferError, match="--run-dir"):
        RunDirectory.lock(tmp_path / "file" / "a", "a")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_place_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(DeepInferError, match="--run-dir"):
        RunDirectory.lock(tmp_path / "a", "a")


def test_a_path_too_long_for_a_socket_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="at most 107"):
        choose_run_directory("a", tmp_path / ("x" * 100))


def test_the_first_place_that_fits(monkeypatch, tmp_path):
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/service")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert choose_run_directory("a", Path("/x/y")) == Path("/x/y")
    assert choose_run_directory("a", None) == Path("/run/service")
    monkeypatch.delenv("RUNTIME_DIRECTORY")
    assert choose_run_directory("a", None) == tmp_path / "deepinfer" / "a"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    monkeypatch.delenv("TMPDIR", raising=False)
    assert choose_run_directory("a", None) == Path("/tmp/deepinfer-1234/a")


class RunDirectoryOf:
    """A locked run directory for a block."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> RunDirectory:
        self._directory = RunDirectory.lock(self._path, "a")
        return self._directory

    def __exit__(self, *_error) -> None:
        self._directory.close()


def test_those_who_ask_find_an_instance_of_systemd(monkeypatch, tmp_path):
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "user"))
    monkeypatch.setattr(run_directory, "SYSTEM_DIRECTORY", tmp_path / "system")
    own, of_system = tmp_path / "user" / "deepinfer" / "a", tmp_path / "system" / "a"
    (tmp_path / "user").mkdir()
    assert find_run_directory("a", None) == own
    with RunDirectoryOf(of_system):
        assert find_run_directory("a", None) == of_system
        assert find_run_directory("a", tmp_path / "b") == tmp_path / "b"
        with RunDirectoryOf(own):
            assert find_run_directory("a", None) == own
