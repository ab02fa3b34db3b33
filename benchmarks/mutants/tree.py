"""Copies of the tree, in which mutants are put and tests run: the checkout itself is never touched."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.mutants.catalog import Mutant


def copy_checkout(root: Path, target: Path) -> None:
    """Copy what git knows of, and new files that it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root, check=True, capture_output=True,
    ).stdout.decode()  # fmt: skip
    for name in filter(None, listed.split("\0")):
        source, place = root / name, target / name
        if source.is_symlink() or source.is_file():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, place, follow_symlinks=False)


@contextlib.contextmanager
def mutated(tree: Path, mutant: Mutant) -> Iterator[None]:
    """Within the block the tree has the fault. Its file gets its old times back too, so that compiled
    modules of before fit it again."""
    place = tree / mutant.file
    kept = place.with_name(place.name + ".unmutated")
    faulty = mutant.source(tree)
    shutil.copy2(place, kept)
    try:
        place.write_text(faulty)
        yield
    finally:
        kept.replace(place)
