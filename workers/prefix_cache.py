"""The prefix cache that a worker's settings ask for."""

from __future__ import annotations

from hicache.copies.cache_copies import CacheCopies
from hicache.copies.open import open_cache_copies
from hicache.errors import HostPoolError
from hicache.layout import CacheLayout
from hicache.manager.host import PoolOrder, open_host_prefix_cache, pool_geometry
from hicache.manager.null import NO_PREFIX_CACHE, PrefixManager
from hicache.pool.host_pool import HostPool
from transport.telemetry.metrics import MetricSet
from workers.contract import Engine, ModelLoadError
from workers.hardware.host_memory import available_host_memory
from workers.settings import WorkerSettings


def check_cache_layout(settings: WorkerSettings, layout: CacheLayout) -> None:
    """Raises `ModelLoadError` if there can be no pool for an engine with this layout."""
    order = _pool_order(settings)
    if order is None:
        return
    try:
        pool_geometry(order, layout, available_host_memory())
    except HostPoolError as error:
        raise ModelLoadError(str(error)) from error


def open_prefix_manager(
    settings: WorkerSettings, engine: Engine, metrics: MetricSet
) -> PrefixManager:
    """Open this rank's cache manager. The caller closes it, after the engine.

    Raises:
        ModelLoadError: the pool cannot be had.
    """
    order = _pool_order(settings)
    if order is None:
        return NO_PREFIX_CACHE

    def copies(pool: HostPool) -> CacheCopies:
        device = engine.device_cache()
        return open_cache_copies(
            device, pool.memory, pool.pages, pool.states, settings.hicache_copy
        )

    try:
        return open_host_prefix_cache(
            order, engine.info.layout, available_host_memory(), copies, metrics
        )
    except HostPoolError as error:
        raise ModelLoadError(str(error)) from error


def _pool_order(settings: WorkerSettings) -> PoolOrder | None:
    if settings.hicache_fd is None:
        return None
    return PoolOrder(settings.hicache_fd, settings.hicache_bytes, settings.hicache_states)
