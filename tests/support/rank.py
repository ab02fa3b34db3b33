"""What a worker is made of, without its sockets: scheduler, prefix cache and the checking fake engine.

The fake's tokens depend on every earlier token as pages have them, and on the last ones as the slot's
state has them. So equality with a straight simulation shows that whatever was loaded was right.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from hicache.copies.cache_copies import CacheCopies
from hicache.copies.open import open_cache_copies
from hicache.errors import HostPoolError
from hicache.manager.host import HostPrefixCache
from hicache.pool.headers import HeaderTable
from hicache.pool.host_pool import HostPool, PoolGeometry
from hicache.pool.segment import create_segment
from transport.ids import ProcessName, RequestId
from transport.messages.generate import Generate, SamplingParams
from transport.telemetry.metrics import MetricSet
from workers.contract import Engine
from workers.engine.fake import FakeEngine, FakeEngineSettings, fake_next_token
from workers.scheduling.scheduler import Scheduler
from workers.scheduling.sequence import Sequence

VOCAB = 23
PAGE = 8
PLENTY = 1 << 40
COPY_SECONDS = 0.25


class LateCopies:
    """Copies that are over only at the `delay`-th question. Pages are stored as late as a GPU may do it:
    when the copy is over, or when a step or a load is about to overwrite them. Until a load is over, the
    host rows that it reads must not be given to anybody who writes."""

    def __init__(self, copies: CacheCopies, pool: HostPool, delay: int) -> None:
        self._copies = copies
        self._pool = pool
        self._delay = delay
        self._stores: list[tuple[set[int], _Late]] = []
        self._loads: list[_Late] = []
        self.refused: set[str] = set()
        """Calls that the device refuses."""

    def _ask(self, call: str) -> None:
        self._check_loads()
        if call in self.refused:
            raise HostPoolError(f"the device refuses to {call}")

    def _check_loads(self) -> None:
        """Of loads that are not over, also where nobody asks any more whether they are."""
        self._loads = [late for late in self._loads if late.finish is not None]
        for late in self._loads:
            assert late.finish is not None
            late.finish()

    def before_step(self, pages) -> None:
        self._check_loads()
        for stored, late in self._stores:
            if stored & set(pages.tolist()):
                late.make()
        self._stores = [(stored, late) for stored, late in self._stores if late.left >= 0]

    def close(self) -> None:
        """Let go of the pool, as a worker does that ends amid copies."""
        self._stores.clear()
        self._loads.clear()
        self._copies = self._pool = None

    def load_pages(self, pages, host_pages):
        self._ask("load_pages")
        self.before_step(pages)
        self._copies.load_pages(pages, host_pages)
        return self._load(self._pool.page_headers, host_pages)

    def store_pages(self, pages, host_pages):
        self._ask("store_pages")
        late = _Late(self._delay, lambda: self._copies.store_pages(pages, host_pages))
        self._stores.append((set(pages.tolist()), late))
        return late

    def load_state(self, slot, position, host_state):
        self._ask("load_state")
        self._copies.load_state(slot, position, host_state)
        return self._load(self._pool.state_headers, [host_state])

    def _load(self, headers: HeaderTable, rows) -> _Late:
        def writes() -> list[int]:
            return headers._table["generation"][rows].tolist()

        def check() -> None:
            assert writes() == before, "a host row was written while it was loaded"

        before = writes()
        late = _Late(self._delay, check)
        self._loads.append(late)
        return late

    def store_state(self, *arguments):
        self._ask("store_state")
        self._copies.store_state(*arguments)
        return _Late(self._delay)


@dataclass
class _Late:
    left: int
    finish: Callable[[], object] | None = None

    def make(self) -> None:
        finish, self.finish = self.finish, None
        if finish is not None:
            finish()

    def done(self) -> bool:
        self.left -= 1
        if self.left < 0:
            self.make()
        return self.left < 0

    def seconds(self) -> float:
        assert self.left < 0, "asked before it was over"
        return COPY_SECONDS


def late_prefix_cache(
    fd: int, engine: Engine, host_pages: int, host_states: int, delay: int
) -> tuple[HostPrefixCache, HostPool, LateCopies]:
    """A cache manager over the pool in `fd`, whose copies are late. Closing it closes the pool."""
    layout = engine.info.layout
    geometry = PoolGeometry(
        layout.fingerprint, layout.page_bytes, host_pages, layout.stored_state_bytes, host_states
    )
    pool = HostPool(fd, geometry, PLENTY)
    device = engine.device_cache()
    copies = open_cache_copies(device, pool.memory, pool.pages, pool.states, "auto")
    late = LateCopies(copies, pool, delay)
    return HostPrefixCache(pool, layout, late, MetricSet(), PLENTY), pool, late


@contextlib.contextmanager
def open_late_prefix_cache(
    engine: Engine, *, host_pages: int, host_states: int = 0, delay: int = 4
) -> Iterator[HostPrefixCache]:
    """The same over a pool of its own."""
    fd = create_segment("test")
    try:
        manager, _, _ = late_prefix_cache(fd, engine, host_pages, host_states, delay)
        with contextlib.closing(manager):
            yield manager
    finally:
        os.close(fd)


class Rank:
    """What a worker is made of, without its sockets."""

    def __init__(self, fd: int, window: int = 0, keep: int = 0, *, num_pages: int = 24,
                 max_num_seqs: int = 4, host_pages: int = 30, host_states: int = 8, delay: int = 0,
                 budget: int = 20, depth: int = 0) -> None:  # fmt: skip
        self.engine = FakeEngine(
            FakeEngineSettings(
                vocab_size=VOCAB, num_pages=num_pages, max_num_seqs=max_num_seqs,
                max_model_len=num_pages * PAGE, page_tokens=PAGE, pipeline_depth=depth,
                window=window, keep_tokens=keep,
            )
        )  # fmt: skip
        states = host_states if window else 0
        manager, self.pool, self.copies = late_prefix_cache(
            fd, self.engine, host_pages, states, delay
        )
        self.cache, self.transfers = manager.cache, manager.transfers
        self.prefills = manager.prefills
        self.scheduler = Scheduler(self.engine.info, budget, 2, manager.reuse)
        self.depth = depth
        self.window = window
        self.got: dict[RequestId, list[int]] = {}
        self.cached: dict[RequestId, int] = {}

    def add(
        self, number: int, prompt: list[int], output: int, prompt_len: int | None = None, **generate
    ) -> Sequence:
        """Queue request `r<number>`. `generate`: fields of `Generate`."""
        sequence = Sequence(
            key=(RequestId(f"r{number}"), 0), frontend=ProcessName("frontend/0"),
            prompt=np.asarray(prompt, np.int32), prompt_len=prompt_len or len(prompt),
            generate=Generate(SamplingParams(max_tokens=output), **generate),
            seed=0, arrival=float(number),
        )  # fmt: skip
        self.scheduler.add(sequence)
        return sequence

    def cancel(self, number: int) -> bool:
        return bool(self.scheduler.cancel(RequestId(f"r{number}")))

    def has_started(self, number: int) -> bool:
        return RequestId(f"r{number}") in self.cached

    def cached_of(self, *numbers: int) -> list[int]:
        """What these requests took from the cache."""
        return [self.cached[RequestId(f"r{number}")] for number in numbers]

    def tokens_of(self, number: int) -> list[int]:
        """What a request has got so far."""
        return self.got.get(RequestId(f"r{number}"), [])

    def simulate(self, prompt: list[int], output: int) -> list[int]:
        """What a request must get."""
        tokens = list(prompt)
        for _ in range(output):
            tokens.append(fake_next_token(np.asarray(tokens, np.int32), VOCAB, self.window))
        return tokens[len(prompt) :]

    def turn(self) -> bool:
        """As the worker's loop does it. False: there was nothing to do."""
        step = self.scheduler.next_step()
        self.scheduler.check_integrity()
        if step is not None:
            self.transfers.load(step.plan.loads, step.plan.written_pages)
            step.launched = self.engine.launch(step.plan)
            self.transfers.store(step.plan.stores)
        worked = self.scheduler.num_in_flight > (self.depth if step is not None else 0)
        if worked:
            output = self.scheduler.collect()
            for sequence in output.step.started:
                self.cached[sequence.key[0]] = sequence.prefix.cached_tokens
            for row in output.rows:
                self.got.setdefault(row.sequence.key[0], []).append(row.token)
        has_arrived = self.transfers.poll()
        self.cache.check_integrity()
        return worked or has_arrived or step is not None or self.transfers.num_open > 0

    def run(self) -> None:
        for _ in range(5000):
            if not self.turn():
                return
        raise AssertionError("it never came to rest")

    def close(self) -> None:
        self.transfers.close()
        self.pool.close()

    def check_rest(self) -> None:
        assert self.scheduler.blocks.pages_used == self.scheduler.blocks.slots_used == 0
        assert self.cache.stats().pages_pinned == 0
        assert self.cache.stats().pending_bytes == 0
