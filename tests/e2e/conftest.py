"""Fixtures of real instances, run through the command line."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.tiny_model import make_tiny_model
from tests.support.instance import (
    COMMAND_SECONDS,
    ROOT,
    Server,
    command_line,
    environment,
    run_server,
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Instances run one test after the other, beside the tests that start none: mostly they wait."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.xdist_group("instances"))


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose page of 128 tokens has 64 KiB, with a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("tiny") / "tiny-llama"
    folder.mkdir()
    make_tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def serve(tiny_dir: Path):
    """serve(model=tiny model, **options): context of a running `deepinfer serve`."""

    def open_server(model: Path | None = None, **options: object):
        return run_server(model or tiny_dir, **options)

    return open_server


@pytest.fixture(scope="session")
def tiny_server(serve) -> Iterator[Server]:
    """The tiny model, for tests of the protocol that do not disturb each other."""
    with serve() as server:
        yield server.ready()


@pytest.fixture(scope="session")
def chat_server(serve, smollm2_dir: Path) -> Iterator[Server]:
    """The default model."""
    with serve(smollm2_dir, dtype="float32") as server:
        yield server.ready()


@pytest.fixture(scope="session")
def fake_server(serve) -> Iterator[Server]:
    """No model: a token every 20 ms."""
    with serve(engine="fake", fake_step_ms=20, max_waiting=2, max_num_seqs=2) as server:
        yield server.ready()


@pytest.fixture(scope="session")
def cli():
    """cli("status", "--json"): run a command to its end; `through` are words before it, such as env."""

    def run(
        *arguments: object,
        timeout: float = COMMAND_SECONDS,
        through: Sequence[str] = (),
        **variables: str,
    ):
        return subprocess.run(
            [*through, *command_line(*arguments)],
            cwd=ROOT, env=environment(variables), stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=timeout, check=False,
        )  # fmt: skip

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
