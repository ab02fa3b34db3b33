"""Fixtures that several test folders share."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from daemon.default_model.fetch import DefaultModelError, ensure_default_model

# As the daemon starts its workers: threads of torch that wait must not spin. Before torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Tables are as wide as they need: pytest-xdist tells its workers of a terminal that they do not have.
os.environ.pop("COLUMNS", None)
# Triton, where it is installed, interprets its kernels on a machine without a GPU. Before Triton is loaded.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Tests never look a model up on the network; the default model comes through pip alone.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A slow or busy machine is no failure.
settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("untimed")
# Of `make test-quick`: the same examples each time, so that its verdict is about the change alone.
settings.register_profile(
    "quick", settings.get_profile("untimed"), derandomize=True, database=None, max_examples=30
)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """Directory of the default model, fetched and converted if this machine lacks it."""
    try:
        return ensure_default_model(lambda line: None)
    except DefaultModelError as error:
        pytest.fail(str(error))


# ---- what tests cost -------------------------------------------------------------------------------
# Judged by processor time, that of processes which a test has ended included: unlike the time on the
# clock it hardly depends on what else the machine does.

SLOW_SECONDS = 10.0
SHOWN = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-limit", type=float, default=None, metavar="SECONDS",
        help="fail the run if a test that is not marked slow takes more processor time",
    )  # fmt: skip


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, where they are handed out one by one: else one process ends alone with them."""
    if os.environ.get("PYTEST_XDIST_WORKER"):
        # Those of a group stay together, in their order: they share what is costly to make.
        items.sort(
            key=lambda item: (
                not (item.get_closest_marker("slow") or item.get_closest_marker("xdist_group"))
            )
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    before = processor_seconds()
    try:
        return (yield)
    finally:
        item.user_properties.append(("cpu_seconds", processor_seconds() - before))


def processor_seconds() -> float:
    found = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in found)


class Costs:
    """What each test took, of all processes of pytest-xdist; lives where the summary is written."""

    def __init__(self, limit: float | None) -> None:
        self._limit = limit
        self._seconds: dict[str, float] = {}
        self._slow: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            name = report.nodeid.partition("@")[0]  # pytest-xdist adds the group
            self._seconds[name] = dict(report.user_properties).get("cpu_seconds", 0.0)
            if "slow" in report.keywords:
                self._slow.add(name)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session):
        if self._too_long() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        return (yield)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._seconds:
            return
        show = terminalreporter.write_line
        total = sum(self._seconds.values())
        terminalreporter.section(f"processor time: {total:.0f} s in {len(self._seconds)} tests")
        dearest = sorted(self._seconds.items(), key=lambda item: -item[1])
        for name, seconds in dearest[:SHOWN]:
            if seconds >= 1.0:
                show(f"{seconds:7.1f} s {'slow' if name in self._slow else '    '} {name}")
        for name, seconds in dearest:
            if seconds > SLOW_SECONDS and name not in self._slow:
                show(f"{name} took {seconds:.1f} s: mark it slow, or make it cheaper.")
        for name in self._too_long():
            show(f"ERROR: {name} is not marked slow and took more than {self._limit:g} s.")

    def _too_long(self) -> list[str]:
        if self._limit is None:
            return []
        found = self._seconds.items()
        return [name for name, took in found if took > self._limit and name not in self._slow]


def pytest_configure(config: pytest.Config) -> None:
    if not os.environ.get("PYTEST_XDIST_WORKER"):
        config.pluginmanager.register(Costs(config.getoption("--cpu-limit")), "costs")
