"""The list of mutants fits the tree, and the runner tells a test that notices from one that does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.mutants import runs
from benchmarks.mutants.catalog import ROOT, Mutant, find_problems, read_mutants
from benchmarks.mutants.runs import Bench, BrokenTestsError

PRODUCT = """
import time

def double(number):
    return number + number

def wait():
    while False:
        time.sleep(1)
"""
TESTS = """
from victim import double, wait

def test_two():
    assert double(2) == 4
    wait()
"""


def make_mutant(name: str, old: str, new: str, tests: tuple[str, ...] = ("test_it.py",)) -> Mutant:
    return Mutant(name, "victim.py", old, new, "it", tests)


@pytest.fixture
def checkout(tmp_path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "victim.py").write_text(PRODUCT)
    (folder / "test_it.py").write_text(TESTS)
    (folder / ".gitignore").write_text("ignored\n")
    (folder / "ignored").touch()
    (folder / "link").symlink_to("victim.py")
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    return folder


def test_every_mutant_fits_the_tree():
    mutants = read_mutants()
    assert list(find_problems(ROOT, mutants)) == []
    packages = {mutant.file.partition("/")[0] for mutant in mutants}
    assert packages == {"transport", "hicache", "workers", "frontend", "daemon"}


def test_what_does_not_fit_is_told(checkout):
    twice = make_mutant("b", "number", "0")
    problems = find_problems(
        checkout,
        [
            make_mutant("a", "number + number", "0"),
            make_mutant("a", "number - number", "0"),
            twice,
            make_mutant("c", "number + number", "(", ("test_it.py::test_two",)),
            make_mutant("d", "number + number", "0", ("test_other.py", "test_it.py::test_three")),
            make_mutant("e", "number + number", "number + number", ()),
        ],
    )
    said = [line.partition(": ") for line in problems]
    assert [(name, text.split(" (")[0]) for name, _, text in said] == [
        ("a", "the name is there twice"),
        ("a", "victim.py holds its text 0 times, not once"),
        ("b", "victim.py holds its text 3 times, not once"),
        ("c", "'(' was never closed"),
        ("d", "there is no test_other.py"),
        ("d", "there is no test_it.py::test_three"),
        ("e", "it has no tests, or changes nothing"),
    ]


@pytest.mark.slow
def test_a_mutant_is_killed_by_a_test_that_fails_or_never_ends(checkout, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "LEAST_SECONDS", 20.0)  # enough for the others on a busy machine
    monkeypatch.setattr(runs, "PATIENCE", 0)
    bench = Bench(checkout, tmp_path / "trees", 2)
    told = []
    bench.try_unmutated(["test_it.py"], lambda file, ended: told.append((file, ended.passed)))
    assert told == [("test_it.py", True)]
    mutants = [
        make_mutant("noticed", "number + number", "number * 3"),
        make_mutant("missed", "number + number", "number * number"),
        make_mutant("hanging", "while False", "while True"),
        make_mutant("broken", "import time", "import no_such_module"),
    ]
    verdicts = {verdict.mutant.name: verdict for verdict in bench.try_mutants(mutants)}
    assert {name: verdict.killed for name, verdict in verdicts.items()} == {
        "noticed": True, "missed": False, "hanging": True, "broken": True,
    }  # fmt: skip
    assert verdicts["noticed"].ended.noticed_by == "test_it.py::test_two"
    assert verdicts["hanging"].ended.noticed_by == "the time limit"
    assert (checkout / "victim.py").read_text() == PRODUCT
    for tree in (tmp_path / "trees").glob("tree*"):
        assert (tree / "victim.py").read_text() == PRODUCT, "each gets the tree back as it was"
        assert (tree / "link").is_symlink()
        assert not (tree / "ignored").exists()
    assert "victim" not in sys.modules, "it was imported in forks alone"


def test_tests_that_fail_without_any_mutant_say_nothing(checkout, tmp_path):
    (checkout / "test_it.py").write_text("def test_two():\n    assert False\n")
    bench = Bench(checkout, tmp_path / "trees", 1)
    with pytest.raises(BrokenTestsError, match=r"test_it.py fails without any mutant"):
        bench.try_unmutated(["test_it.py"], lambda file, ended: None)
