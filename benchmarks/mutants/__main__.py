"""Puts small faults into copies of the product and runs the tests that should notice:
`python -m benchmarks.mutants`.

Exit code 1: too few were noticed. 2: the list does not fit the tree, or tests fail without any fault.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import cyclopts
import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.mutants.catalog import ROOT, Mutant, find_problems, read_mutants
from benchmarks.mutants.forks import Ended, preload
from benchmarks.mutants.runs import Bench, BrokenTestsError, Verdict

LEAST_KILLED: Final = 0.95

Words = Annotated[list[str] | None, cyclopts.Parameter(consume_multiple=True)]


def main(*, jobs: int | None = None, only: Words = None, json: Path | None = None) -> int:
    """Try the mutants.

    Parameters
    ----------
    jobs
        How many run at a time; default: as many as there are processors.
    only
        Only those whose name, package or file holds one of these words.
    json
        Write the verdicts to this file.
    """
    console = Console(highlight=False, soft_wrap=True)
    every = read_mutants()
    problems = list(find_problems(ROOT, every))
    for problem in problems:
        console.print(problem, style="red", markup=False)
    mutants = [mutant for mutant in every if _is_wanted(mutant, only)]
    if problems or not mutants:
        return 2
    began = time.monotonic()
    try:
        verdicts = _try(mutants, jobs or len(os.sched_getaffinity(0)), console)
    except BrokenTestsError as error:
        console.print(str(error), style="red", markup=False)
        return 2
    killed = sum(verdict.killed for verdict in verdicts)
    console.print(_table(verdicts))
    for verdict in verdicts:
        if not verdict.killed:
            mutant = verdict.mutant
            console.print(f"survived: {mutant.name} ({mutant.file}): {mutant.breaks}", markup=False)
    minutes = (time.monotonic() - began) / 60
    console.print(f"{killed} of {len(verdicts)} killed in {minutes:.1f} minutes")
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(list(map(_row, verdicts)))))
    return 0 if killed >= LEAST_KILLED * len(verdicts) else 1


def _is_wanted(mutant: Mutant, only: Sequence[str] | None) -> bool:
    said = f"{mutant.package} {mutant.name} {mutant.file}"
    return only is None or any(word in said for word in only)


def _try(mutants: list[Mutant], jobs: int, console: Console) -> list[Verdict]:
    tests = {test for mutant in mutants for test in mutant.tests}
    preload()
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="di-mutants-") as folder:
        bench = Bench(ROOT, Path(folder), jobs)
        console.print(f"the tests as they are, then {len(mutants)} mutants, {jobs} at a time")

        def tell(file: str, ended: Ended) -> None:
            console.print(f"{ended.seconds:6.1f} s  {file}", markup=False)

        bench.try_unmutated(tests, tell)
        for verdict in bench.try_mutants(mutants):
            verdicts.append(verdict)
            said = verdict.ended.noticed_by if verdict.killed else "SURVIVED"
            console.print(
                f"{len(verdicts):3}/{len(mutants)} {verdict.ended.seconds:6.1f} s  "
                f"{verdict.mutant.name}: {said}",
                markup=False,
            )
    return sorted(verdicts, key=lambda verdict: mutants.index(verdict.mutant))


def _table(verdicts: list[Verdict]) -> Table:
    table = Table("package", "mutants", "killed", "seconds")
    for package, count in Counter(v.mutant.package for v in verdicts).items():
        own = [verdict for verdict in verdicts if verdict.mutant.package == package]
        seconds = sum(verdict.ended.seconds for verdict in own)
        table.add_row(package, str(count), str(sum(v.killed for v in own)), f"{seconds:.0f}")
    return table


def _row(verdict: Verdict) -> dict[str, object]:
    return {
        "name": verdict.mutant.name,
        "file": verdict.mutant.file,
        "breaks": verdict.mutant.breaks,
        "killed": verdict.killed,
        "noticed_by": verdict.ended.noticed_by if verdict.killed else None,
        "seconds": round(verdict.ended.seconds, 2),
    }


if __name__ == "__main__":
    sys.exit(cyclopts.run(main))
