"""The copies that suit where an engine's rows lie."""

from __future__ import annotations

from hicache.copies.cache_copies import CacheCopies, DeviceCache
from hicache.copies.copy_choice import CopyChoice
from hicache.copies.row_copy import HostRowCopier, copy_now
from hicache.copies.rows import HostRows, RowArray


def open_cache_copies(
    device: DeviceCache, memory: RowArray, pages: HostRows, states: HostRows, choice: CopyChoice
) -> CacheCopies:
    """Copies between an engine's cache and a host pool.

    Args:
        device: what the engine offers.
        memory: the whole host pool; page-locked for a GPU until the copies are closed.
        pages: host pages, in `memory`.
        states: host states, in `memory`.
        choice: how pages travel to and from a GPU.

    Raises:
        HostPoolError: the memory cannot be page-locked, or pages cannot be copied as `choice` says.
    """
    if isinstance(device.pages, HostRows):
        copier = HostRowCopier(device.pages, pages)
        return CacheCopies(copier, device.states, states, copy_now, close=lambda: None)
    # Imported here: the fake engine, and so every protocol test, starts without torch.
    from hicache.copies.cuda.open import open_gpu_cache_copies  # noqa: PLC0415

    return open_gpu_cache_copies(device, memory, pages, states, choice)
