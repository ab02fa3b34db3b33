"""The cache manager of a worker without a prefix cache: everything is computed, nothing is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from hicache.copies.runs import IndexArray
from hicache.manager.host import HostPrefixCache
from hicache.manager.reuse import PrefixReuse
from hicache.manager.step_copies import PrefixLoad, PrefixStore
from hicache.manager.ticket import PrefixTicket
from transport.framing import TokenArray
from transport.messages.cache_report import CacheContent
from transport.messages.control import CacheAction


class NoReuse:
    """Stands in for `PrefixReuse`."""

    def enqueue(self, ticket: PrefixTicket, tokens: TokenArray) -> None:
        pass

    def should_wait(self, ticket: PrefixTicket) -> bool:
        return False

    def start(self, ticket: PrefixTicket, make_room: Callable[[int], bool]) -> int:
        return 0

    def end_chunk(self, ticket: PrefixTicket, stop: int) -> int:
        return stop

    def begin_load(self, ticket: PrefixTicket, slot: int, pages: tuple[int, ...]) -> None:
        pass

    def advance(self, ticket: PrefixTicket, num_computed: int) -> None:
        pass

    def begin_store(self, ticket: PrefixTicket, slot: int, pages: tuple[int, ...]) -> None:
        pass

    def drop(self, ticket: PrefixTicket) -> None:
        pass

    def check_integrity(
        self, queued: Iterable[PrefixTicket], started: Iterable[PrefixTicket]
    ) -> None:
        pass


class NoTransfers:
    """Stands in for `PrefixTransfers`."""

    num_open = 0

    def load(self, loads: Iterable[PrefixLoad], written_pages: Callable[[], IndexArray]) -> None:
        pass

    def store(self, stores: Iterable[PrefixStore]) -> None:
        pass


class NoPrefixCache:
    """Stands in for `HostPrefixCache`."""

    def __init__(self) -> None:
        self.reuse = NoReuse()
        self.transfers = NoTransfers()

    def tick(self) -> bool:
        return False

    def carry_out(self, action: CacheAction) -> CacheContent:
        return CacheContent(enabled=False)

    def close(self) -> None:
        pass

    def check_integrity(self) -> None:
        pass


NO_REUSE: Final = NoReuse()
NO_PREFIX_CACHE: Final = NoPrefixCache()

Reuse = PrefixReuse | NoReuse
PrefixManager = HostPrefixCache | NoPrefixCache
