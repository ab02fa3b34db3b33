"""Runs test files in several trees at once: first as they are, then with one mutant after the other."""

from __future__ import annotations

import contextlib
import select
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

from benchmarks.mutants.catalog import Mutant
from benchmarks.mutants.forks import Ended, TestFork
from benchmarks.mutants.tree import copy_checkout, mutated

UNMUTATED_SECONDS: Final = 300.0
"""Longest run of one test file as it is."""
LEAST_SECONDS: Final = 30.0
"""A mutant's tests may take this long, or so many times as long as without it:"""
PATIENCE: Final = 10

T = TypeVar("T")


class BrokenTestsError(Exception):
    """The tests fail without any mutant, so they say nothing about one."""


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant."""

    mutant: Mutant
    ended: Ended

    @property
    def killed(self) -> bool:
        return not self.ended.passed


@dataclass
class _Job(Generic[T]):
    """Tests under way in one tree."""

    item: T
    fork: TestFork
    limit: float
    undo: contextlib.ExitStack


class Bench:
    """Copies of one checkout, `jobs` of them, each for one run at a time. All lie in `folder`."""

    def __init__(self, root: Path, folder: Path, jobs: int) -> None:
        self._folder = folder
        self._trees = [folder / f"tree{number}" for number in range(jobs)]
        self._seconds: dict[str, float] = {}
        copy_checkout(root, self._trees[0])

    def try_unmutated(self, tests: Iterable[str], tell: Callable[[str, Ended], None]) -> None:
        """Run all tests once as they are, file by file. What that compiles is kept for the mutants.

        Raises:
            BrokenTestsError: one fails.
        """

        by_file: dict[str, list[str]] = {}
        for test in sorted(set(tests)):
            by_file.setdefault(_file_of(test), []).append(test)

        def start(tree: Path, file: str, log: Path, _: contextlib.ExitStack) -> TestFork:
            return TestFork(tree, by_file[file], log, keeps_bytecode=True)

        limits = dict.fromkeys(by_file, UNMUTATED_SECONDS)
        # All in the first tree: they change nothing there but compiled modules, which the others get too.
        first = [self._trees[0]] * len(self._trees)
        for file, ended in self._run(limits, first, start):
            tell(file, ended)
            if not ended.passed:
                raise BrokenTestsError(f"{file} fails without any mutant:\n{ended.log[-4000:]}")
            self._seconds[file] = ended.seconds
        for tree in self._trees[1:]:
            shutil.copytree(self._trees[0], tree, symlinks=True)

    def try_mutants(self, mutants: Iterable[Mutant]) -> Iterator[Verdict]:
        """Verdicts as they come. The tests of all must have been tried unmutated."""

        def start(tree: Path, mutant: Mutant, log: Path, undo: contextlib.ExitStack) -> TestFork:
            undo.enter_context(mutated(tree, mutant))
            return TestFork(tree, mutant.tests, log, keeps_bytecode=False)

        limits = {mutant: self._limit(mutant) for mutant in mutants}
        for mutant, ended in self._run(limits, self._trees, start):
            if ended.nothing_ran:
                raise BrokenTestsError(f"{mutant.name}: its test files hold no test that can run")
            yield Verdict(mutant, ended)

    def _limit(self, mutant: Mutant) -> float:
        return max(
            LEAST_SECONDS, PATIENCE * sum(self._seconds[_file_of(test)] for test in mutant.tests)
        )

    def _run(
        self,
        limits: Mapping[T, float],
        trees: list[Path],
        start: Callable[[Path, T, Path, contextlib.ExitStack], TestFork],
    ) -> Iterator[tuple[T, Ended]]:
        waiting = list(limits.items())
        running: dict[int, _Job[T]] = {}
        try:
            while waiting or running:
                for place in range(len(trees)):
                    if place not in running and waiting:
                        item, limit = waiting.pop(0)
                        log, undo = self._folder / f"log{place}", contextlib.ExitStack()
                        with contextlib.ExitStack() as on_error:
                            on_error.push(undo)
                            fork = start(trees[place], item, log, undo)
                            on_error.pop_all()
                        running[place] = _Job(item, fork, limit, undo)
                yield from _ended(running)
        finally:
            for job in running.values():
                job.fork.end(is_late=True)
                job.undo.close()


def _file_of(test: str) -> str:
    return test.partition("::")[0]


def _ended(running: dict[int, _Job[T]]) -> Iterator[tuple[T, Ended]]:
    """Wait until some of them have ended, or must be; they are taken out."""
    poller = select.poll()
    for job in running.values():
        poller.register(job.fork.pidfd, select.POLLIN)
    left = min(job.limit - job.fork.seconds for job in running.values())
    over = {fd for fd, _ in poller.poll(max(0.0, left) * 1000)}
    for place, job in list(running.items()):
        is_late = job.fork.pidfd not in over
        if is_late and job.fork.seconds < job.limit:
            continue
        del running[place]
        with job.undo:
            ended = job.fork.end(is_late=is_late)
        yield job.item, ended
