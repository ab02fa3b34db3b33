"""Fixtures of real instances, run through the command line."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.tiny_model import make_tiny_model
from tests.support.forks.forker import Forker, fork_server
from tests.support.instance import (
    COMMAND_SECONDS,
    ROOT,
    Server,
    command_line,
    environment,
    run_server,
    start_command,
)

SHARED = {"tiny_server", "chat_server", "fake_server"}
"""Instances of the whole session, further down."""


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Instances run in two rows, beside the tests that start none: mostly they wait. The first row has the
    instances that files share, so that no other process needs them too."""
    ours = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    sharing = {item.path for item in ours if not SHARED.isdisjoint(item.fixturenames)}
    for item in ours:
        row = "shared instances" if item.path in sharing else "own instances"
        item.add_marker(pytest.mark.xdist_group(row))


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose page of 128 tokens has 64 KiB, with a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("tiny") / "tiny-llama"
    folder.mkdir()
    make_tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def forker() -> Iterator[Forker]:
    """Starts commands as forks of one process that has imported everything."""
    with fork_server(environment()) as forker:
        yield forker


@pytest.fixture(scope="session")
def serve(tiny_dir: Path, forker: Forker):
    """serve(model=tiny model, **options): context of a running `deepinfer serve`, whose processes are
    forks; with `forked=False` as a user starts it."""

    def open_server(model: Path | None = None, forked: bool = True, **options: object):
        return run_server(model or tiny_dir, forker if forked else None, **options)

    return open_server


@pytest.fixture(scope="session")
def tiny_server(serve) -> Iterator[Server]:
    """The tiny model, for tests of the protocol that do not disturb each other."""
    with serve() as server:
        yield server.ready()


@pytest.fixture(scope="session")
def chat_server(serve, smollm2_dir: Path) -> Iterator[Server]:
    """The default model, started as a user does."""
    with serve(smollm2_dir, forked=False, dtype="float32") as server:
        yield server.ready()


@pytest.fixture(scope="session")
def fake_server(serve) -> Iterator[Server]:
    """No model: a token every 20 ms. Started as a user does."""
    options = dict(engine="fake", fake_step_ms=20, max_waiting=2, max_num_seqs=2)
    with serve(forked=False, **options) as server:
        yield server.ready()


@pytest.fixture(scope="session")
def cli(forker: Forker):
    """cli("status", "--json"): run a command to its end; `through` are words before it, such as env."""

    def run(
        *arguments: object,
        timeout: float = COMMAND_SECONDS,
        through: Sequence[str] = (),
        **variables: str,
    ):
        # What the interpreter itself reads, and other programs before it, need a start of its own.
        is_forked = not through and all(name.startswith("DEEPINFER_") for name in variables)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            process = start_command(
                arguments, out, errors, forker if is_forked else None, variables, through
            )
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait(timeout)
                raise
            texts = [file.seek(0) or file.read().decode() for file in (out, errors)]
        return subprocess.CompletedProcess(arguments, code, *texts)

    return run


@pytest.fixture(scope="session")
def within():
    """within(1.0): the deadline of what users are promised so soon. Held with TEST_TIMED=1, for a quiet
    machine; without it a busy one gets its time."""
    is_timed = os.environ.get("TEST_TIMED") == "1"
    return lambda seconds: seconds if is_timed else COMMAND_SECONDS


@pytest.fixture(scope="session")
def launch():
    """launch("start", …): a command that is running, with its output in pipes."""

    def run(*arguments: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command_line(*arguments),
            cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    return run


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's name."""
    folder = Path(tempfile.mkdtemp(prefix="di-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)
