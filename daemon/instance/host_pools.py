"""The memory of the ranks' prefix caches: made and held by the daemon, so that it outlives a worker.

Nothing of it has a name, so nothing stays behind however the daemon ends. A worker sizes its pool,
since only it knows how large a page is.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

from daemon.configuration.config import InstanceConfig
from daemon.errors import ConfigurationError, DeepInferError
from hicache.errors import HostPoolError
from hicache.pool.segment import create_segment
from transport.wording import GIB
from workers.hardware.host_memory import available_host_memory

GPU_POOL_GIB: Final = 32.0
CPU_POOL_GIB: Final = 0.5
"""Defaults of --hicache-size-gb, where there is that much."""
POOL_SHARE: Final = {"nvidia": 0.5, "cpu": 0.05}
"""Largest share of the available memory that the default takes, all ranks together."""
SMALLEST_POOL_GIB: Final = 0.03
"""A default below this is no use: off."""
STATE_SLOTS: Final = {"nvidia": 4096, "cpu": 256}
"""Defaults of --hicache-state-slots."""


def pool_bytes(config: InstanceConfig, accelerator: str) -> int:
    """Bytes for the pages of each rank's prefix cache; 0: no prefix cache."""
    if config.hicache_size_gb is not None:
        return round(config.hicache_size_gb * GIB)
    if config.engine == "fake":
        return 0
    wanted = GPU_POOL_GIB if accelerator == "nvidia" else CPU_POOL_GIB
    share = available_host_memory() * POOL_SHARE[accelerator] / config.dp / GIB
    size = min(wanted, share)
    return round(size * GIB) if size >= SMALLEST_POOL_GIB else 0


def check_pools(config: InstanceConfig) -> None:
    """Whether the pools that were asked for fit, before hours of loading weights.

    States come on top, and only a worker knows their size: it checks again.

    Raises:
        ConfigurationError: they do not.
    """
    if not config.hicache_size_gb:
        return
    wanted, found = config.dp * config.hicache_size_gb, available_host_memory() / GIB
    if wanted > found:
        workers = f" for {config.dp} workers" if config.dp > 1 else ""
        raise ConfigurationError(
            f"The prefix cache needs {wanted:.1f} GiB of host memory{workers}, but {found:.1f} GiB are "
            "available: lower --hicache-size-gb, or turn it off with 0."
        )


class HostPools:
    """Owner of one segment a rank."""

    def __init__(self, instance: str, ranks: int) -> None:
        """Make empty segments.

        Raises:
            DeepInferError: the operating system refuses.
        """
        self.descriptors: list[int] = []
        try:
            for rank in range(ranks):
                self.descriptors.append(create_segment(f"deepinfer-{instance}-{rank}"))
        except HostPoolError as error:
            self.close()
            raise DeepInferError(str(error)) from error

    def close(self) -> None:
        """Close the segments; their memory is free once no worker maps them. Idempotent."""
        for descriptor in self.descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self.descriptors = []
