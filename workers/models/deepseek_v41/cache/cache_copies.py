"""Pages and stored states on their way between this engine and a host pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from hicache.copies.cuda.pools import open_cuda_row_copier, record_time
from hicache.copies.cuda.row_copy import TimedCopy
from hicache.copies.row_copy import CpuRowCopier, PendingCopy, RowCopier, copy_now
from hicache.errors import HostPoolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache.copies.copy_choice import CopyChoice
    from hicache.copies.runs import IndexArray
    from hicache.pool.host_pool import HostPool
    from workers.contract import StepPlan
    from workers.models.deepseek_v41.cache.pools import ServingCaches


class StateOwner(Protocol):
    """The engine, as far as copies need it."""

    @property
    def caches(self) -> ServingCaches: ...

    def cut_state(self, slot: int, position: int) -> Tensor:
        """The stored form of the state of `slot` after `position` tokens: uint8 [stored_state_bytes]."""
        ...

    def load_state(self, slot: int, stored: Tensor, position: int) -> None:
        """Put a stored state into `slot` before its first chunk, which starts at `position`."""
        ...


class DeepseekV41Copies:
    """See `hicache.copies.cache_copies.CacheCopies`. On a GPU the pool is page-locked already."""

    def __init__(self, engine: StateOwner, pool: HostPool, hicache_copy: CopyChoice) -> None:
        """
        Raises:
            HostPoolError: pages cannot be copied as `hicache_copy` says.
        """
        pages = engine.caches.pages
        self._engine = engine
        self._on_cpu = pages.device.type == "cpu"
        self._pages: RowCopier
        if self._on_cpu:
            self._pages = CpuRowCopier(pages.numpy(), pool.page_rows)
        else:
            self._pages = open_cuda_row_copier(pages, pool.page_rows, hicache_copy)
        self._states = torch.from_numpy(pool.state_rows)
        self._device = pages.device

    def before_step(self, plan: StepPlan) -> None:
        """Keep the pages that `plan` writes to apart from stores that are under way. States travel on
        the engine's stream."""
        self._pages.before_overwrite(plan.written_pages())

    def load_pages(self, pages: IndexArray, host_slots: IndexArray) -> PendingCopy:
        return self._pages.upload(pages, host_slots)

    def store_pages(self, pages: IndexArray, host_slots: IndexArray) -> PendingCopy:
        return self._pages.download(pages, host_slots)

    def load_state(self, slot: int, position: int, host_slot: int) -> PendingCopy:
        def copy() -> None:
            stored = self._states[host_slot].to(self._device, non_blocking=True)
            self._engine.load_state(slot, stored, position)

        return self._run(copy)

    def store_state(self, slot: int, position: int, host_slot: int) -> PendingCopy:
        """See `CacheCopies`.

        Raises:
            HostPoolError: the device has no memory left to cut the state out.
        """

        def copy() -> None:
            try:
                stored = self._engine.cut_state(slot, position)
            except torch.OutOfMemoryError as error:
                raise HostPoolError(f"a state cannot be cut out: {error}") from error
            self._states[host_slot].copy_(stored, non_blocking=True)

        return self._run(copy)

    def _run(self, copy: Callable[[], None]) -> PendingCopy:
        if self._on_cpu:
            return copy_now(copy)
        begun = record_time()
        copy()
        return TimedCopy(begun, record_time())
