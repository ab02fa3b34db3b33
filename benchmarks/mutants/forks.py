"""Tests in forks of a process that has loaded the heavy libraries: each starts at once, and imports the
product anew, from the tree that it is given.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

import hypothesis
import pytest

LIBRARIES: Final = (
    "torch", "transformers", "transformers.models.auto.modeling_auto", "tokenizers", "safetensors",
    "starlette.routing", "uvicorn", "uvloop", "zmq", "zmq.asyncio", "msgspec", "numpy", "psutil",
    "jinja2", "rich.console", "rich.table", "cyclopts", "prometheus_client", "httptools", "openai",
)  # fmt: skip
QUIET: Final = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
"""As tests set them themselves, but before torch is loaded; one thread, for several run beside another."""
LEFT_BEHIND: Final = (
    "benchmarks",
    "tests",
    "transport",
    "hicache",
    "workers",
    "frontend",
    "daemon",
)
"""Packages that a fork must not have from its parent."""
NOTHING_RAN: Final = 5
"""Exit code of pytest."""
UNFIT: Final = 70
"""Exit code of a fork in which no test was begun."""
_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


def preload(libraries: Sequence[str] = LIBRARIES) -> None:
    """Load what the product and its tests use of others. Starts no thread."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    for library in libraries:
        with contextlib.suppress(ImportError):  # the tests will say what they lack
            importlib.import_module(library)
    gc.collect()
    gc.freeze()


class SteadyExamples:
    """A plugin of pytest: Hypothesis tries the same examples each time, and does not look for simpler
    ones, so that a verdict is quick and does not hang on luck."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        settings, phase = hypothesis.settings, hypothesis.Phase
        phases = (phase.explicit, phase.generate)
        settings.register_profile(
            "mutants", settings(derandomize=True, database=None, phases=phases)
        )
        settings.load_profile("mutants")


@dataclass(frozen=True)
class Ended:
    """How a run of tests ended."""

    code: int
    """As pytest gives it, or minus the number of a signal."""
    seconds: float
    is_late: bool
    """Whether it was killed for taking too long."""
    log: str

    @property
    def passed(self) -> bool:
        return self.code == 0

    @property
    def nothing_ran(self) -> bool:
        return self.code in (NOTHING_RAN, UNFIT)

    @property
    def noticed_by(self) -> str:
        found = _FAILED.search(self.log)
        return found[1] if found else "the time limit" if self.is_late else f"exit code {self.code}"


class TestFork:
    """One run of test files in a tree. Owns the process, and its group."""

    __test__ = False

    def __init__(
        self, tree: Path, files: Sequence[str], log: Path, *, keeps_bytecode: bool
    ) -> None:
        """`keeps_bytecode`: leave compiled modules in the tree for later runs."""
        self._log = log
        self._began = time.monotonic()
        sys.stdout.flush()
        self._pid = os.fork()
        if not self._pid:
            _run(tree, files, log, keeps_bytecode)
        self.pidfd = os.pidfd_open(self._pid)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def end(self, *, is_late: bool = False) -> Ended:
        """Reap the process, and kill what is left of its group; with `is_late`, itself as well."""
        seconds = self.seconds
        if is_late:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        # The number of the group is the process's, which stays taken until it is reaped.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)
        os.close(self.pidfd)
        log = self._log.read_text(errors="replace")
        return Ended(os.waitstatus_to_exitcode(status), seconds, is_late, log)


def _run(tree: Path, files: Sequence[str], log: Path, keeps_bytecode: bool) -> NoReturn:
    """The fork's life. It returns to none of its parent's code."""
    code = UNFIT
    try:
        os.setsid()
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):  # nohup ignores the first
            signal.signal(
                number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            )
        _redirect(log)
        root = str(Path.cwd())
        os.chdir(tree)
        sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", root))]
        os.environ["PYTHONPATH"] = str(tree)
        sys.dont_write_bytecode = not keeps_bytecode
        if not keeps_bytecode:
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        for name in list(sys.modules):
            if name.partition(".")[0] in LEFT_BEHIND:
                del sys.modules[name]
        importlib.invalidate_caches()
        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not gpu"]
        code = int(pytest.main([*options, *files], plugins=[SteadyExamples()]))
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(code)


def _redirect(log: Path) -> None:
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, place in ((nothing, 0), (written, 1), (written, 2)):
        os.dup2(source, place)
    sys.stdout, sys.stderr = (os.fdopen(place, "w", closefd=False) for place in (1, 2))
