"""A rank over a prefix cache of its own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import pytest

from hicache.pool.segment import create_segment
from tests.support.rank import Rank


@pytest.fixture
def make_rank() -> Iterator[Callable[..., Rank]]:
    """make_rank(window=0, keep=0, ...): a rank over a pool of its own."""
    with contextlib.ExitStack() as stack:

        def make(*model: int, **options) -> Rank:
            fd = create_segment("test")
            stack.callback(os.close, fd)
            rank = Rank(fd, *model, **options)
            stack.callback(rank.close)
            return rank

        yield make
