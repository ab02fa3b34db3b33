"""Free rows kept as runs of neighbours, so that a prefix gets few, long runs and copies merge."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hicache.copies.runs import IndexArray


class RunAllocator:
    """Hands out rows of 0 .. count-1, O(1) a run.

    Free runs lie in classes by the bit length of their size. A request gets the tightest run that
    holds all of it, as far as the classes tell; else the longest runs there are.
    """

    def __init__(self, count: int, taken: Iterable[int] = ()) -> None:
        self._count = count
        self._taken = np.ones(count, dtype=np.bool_)
        self._length_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}  # by the row after the run
        self._classes: list[dict[int, None]] = [{} for _ in range(count.bit_length() + 1)]
        self._num_free = 0
        free = np.ones(count, dtype=np.bool_)
        free[np.fromiter(taken, np.int32)] = False
        self.give_back(np.flatnonzero(free).astype(np.int32))

    @property
    def num_free(self) -> int:
        return self._num_free

    def take(self, count: int) -> IndexArray:
        """Hand out `count` rows, in ascending order within each run.

        Raises:
            IndexError: fewer are free (nothing is taken then).
        """
        if count > self._num_free:
            raise IndexError(f"{count} wanted, {self._num_free} free")
        parts = [np.empty(0, np.int32)]
        left = count
        while left:
            start = self._best_run(left)
            length = self._remove(start)
            size = min(length, left)
            if size < length:
                self._add(start + size, length - size)
            parts.append(np.arange(start, start + size, dtype=np.int32))
            left -= size
        rows = np.concatenate(parts)
        self._taken[rows] = True
        self._num_free -= count
        return rows

    def give_back(self, rows: IndexArray) -> None:
        """Return rows.

        Raises:
            KeyError: one of them was not handed out, or comes twice.
        """
        if not len(rows):
            return
        ordered = np.sort(rows)
        if not self._taken[ordered].all() or not np.diff(ordered).all():
            raise KeyError("a row was given back that is free already")
        self._taken[ordered] = False
        self._num_free += len(ordered)
        for run in np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1):
            start, length = int(run[0]), len(run)
            before = self._start_before.get(start)
            if before is not None:
                start, length = before, length + self._remove(before)
            if start + length in self._length_at:
                length += self._remove(start + length)
            self._add(start, length)

    def check_integrity(self, owned: Iterable[int]) -> None:
        owners = list(owned)
        free = [
            row for start, size in self._length_at.items() for row in range(start, start + size)
        ]
        if sorted(owners + free) != list(range(self._count)):
            raise AssertionError("a row is lost, has two owners, or is both free and owned")
        if set(np.flatnonzero(self._taken).tolist()) != set(owners) or len(free) != self._num_free:
            raise AssertionError("the count of free rows is wrong")
        ends = {start + size: start for start, size in self._length_at.items()}
        if ends != self._start_before or ends.keys() & self._length_at.keys():
            raise AssertionError("neighbouring free runs are not merged")
        classes = {start: k for k, runs in enumerate(self._classes) for start in runs}
        if classes != {start: size.bit_length() for start, size in self._length_at.items()}:
            raise AssertionError("a free run is in the wrong class")

    def _best_run(self, count: int) -> int:
        own = count.bit_length()
        if own < len(self._classes) and self._classes[own]:
            start = self._peek(own)
            if self._length_at[start] >= count:
                return start
        for larger in range(own + 1, len(self._classes)):
            if self._classes[larger]:
                return self._peek(larger)
        longest = max(k for k, runs in enumerate(self._classes) if runs)
        return self._peek(longest)

    def _peek(self, size_class: int) -> int:
        # popitem and not iteration: iteration steps over all entries deleted before.
        runs = self._classes[size_class]
        start, _ = runs.popitem()
        runs[start] = None
        return start

    def _add(self, start: int, length: int) -> None:
        self._length_at[start] = length
        self._start_before[start + length] = start
        self._classes[length.bit_length()][start] = None

    def _remove(self, start: int) -> int:
        length = self._length_at.pop(start)
        del self._start_before[start + length]
        del self._classes[length.bit_length()][start]
        return length
