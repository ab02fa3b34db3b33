"""The mutants that were chosen, a file for each package, and how they are read."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[3]


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fault: in `file`, which holds the text `old` once, `new` takes its place."""

    name: str
    file: str
    old: str
    new: str
    breaks: str
    """What a user or an operator would lose by it."""
    tests: tuple[str, ...]
    """Test files that should notice, the likeliest first; or single tests of slow ones, `file::test`."""
    package: str = ""

    def source(self, root: Path) -> str:
        """The file's text with the fault.

        Raises:
            ValueError: the text to replace is not there, or there more than once.
        """
        text = (root / self.file).read_text()
        found = text.count(self.old)
        if found != 1:
            raise ValueError(f"{self.file} holds its text {found} times, not once")
        return text.replace(self.old, self.new)


def read_mutants() -> list[Mutant]:
    """All mutants, package by package."""
    return [
        msgspec.structs.replace(mutant, package=file.stem)
        for file in sorted(Path(__file__).parent.glob("*.toml"))
        for mutant in msgspec.convert(tomllib.loads(file.read_text())["mutant"], list[Mutant])
    ]


def find_problems(root: Path, mutants: Iterable[Mutant]) -> Iterator[str]:
    """A sentence for each mutant that does not fit the tree any more."""
    names: set[str] = set()
    for mutant in mutants:
        if mutant.name in names:
            yield f"{mutant.name}: the name is there twice"
        names.add(mutant.name)
        yield from (
            f"{mutant.name}: there is no {test}" for test in mutant.tests if not _exists(root, test)
        )
        if not mutant.tests or mutant.old == mutant.new:
            yield f"{mutant.name}: it has no tests, or changes nothing"
        try:
            compile(mutant.source(root), mutant.file, "exec")
        except (OSError, ValueError, SyntaxError) as error:
            yield f"{mutant.name}: {error}"


def _exists(root: Path, test: str) -> bool:
    file, _, function = test.partition("::")
    return (root / file).is_file() and f"def {function}" in (root / file).read_text()
