"""Small pools and caches over them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from hicache.cache.outcomes import Hit
from hicache.cache.prefix_cache import PrefixCache
from hicache.pool.host_pool import HostPool, PoolGeometry
from hicache.pool.segment import create_segment

PAGE = 4
REPLAY = 3
PLENTY = 1 << 40


@dataclass
class Clock:
    """Nanoseconds that pass only when told to."""

    now: int = 0

    def __call__(self) -> int:
        return self.now


@dataclass
class SmallCache:
    """A cache of pages of 4 tokens, with 3 tokens to replay."""

    fd: int
    geometry: PoolGeometry
    max_pending_bytes: int
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.attach()

    def attach(self) -> None:
        """What a new worker does with the segment."""
        self.pool = HostPool(self.fd, self.geometry, PLENTY)
        self.cache = PrefixCache(
            self.pool,
            page_tokens=PAGE,
            replay_tokens=REPLAY,
            max_pending_bytes=self.max_pending_bytes,
            clock=self.clock,
        )

    def restart(self, fingerprint: str | None = None) -> None:
        """End the worker without a farewell and start another."""
        self.pool.close()
        if fingerprint is not None:
            self.geometry = PoolGeometry(
                fingerprint,
                self.geometry.page_bytes,
                self.geometry.num_pages,
                self.geometry.state_bytes,
                self.geometry.num_states,
            )
        self.attach()

    def store(self, tokens: list[int], anchors: tuple[int, ...] | None = None, salt="") -> bool:
        """Store a prompt; whether there was something to copy."""
        plan = self.cache.stores.begin(self.cache.keys(np.array(tokens, np.int32), salt), anchors)
        if plan is not None:
            self.cache.stores.commit(plan)
        self.cache.check_integrity()
        return plan is not None

    def hit(self, tokens: list[int], salt="") -> int:
        """Tokens that a lookup finds; releases them at once."""
        found = self.cache.lookup(self.cache.keys(np.array(tokens, np.int32), salt))
        if not isinstance(found, Hit):
            return 0
        self.cache.release(found)
        self.cache.check_integrity()
        return found.num_tokens


@pytest.fixture
def make_cache() -> Iterator[Callable[..., SmallCache]]:
    """make_cache(num_pages, num_states=0): a cache over a new segment."""
    with contextlib.ExitStack() as stack:

        def make(num_pages: int, num_states: int = 0, max_pending_bytes: int = 1 << 30):
            fd = create_segment("test")
            stack.callback(os.close, fd)
            geometry = PoolGeometry("model", 64, num_pages, 32 if num_states else 0, num_states)
            small = SmallCache(fd, geometry, max_pending_bytes)
            stack.callback(lambda: small.pool.close())  # noqa: PLW0108 - another pool by then
            return small

        yield make
