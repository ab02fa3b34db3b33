"""How large the ranks' prefix caches are made, and what happens to their memory."""

from __future__ import annotations

import os

import pytest

from daemon.configuration.config import InstanceConfig
from daemon.errors import ConfigurationError
from daemon.instance import host_pools
from daemon.instance.host_pools import HostPools, check_pools, pool_bytes
from transport.wording import GIB


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch):
    """memory(GiB): what is available."""

    def available(gib: float) -> None:
        monkeypatch.setattr(host_pools, "available_host_memory", lambda: round(gib * GIB))

    return available


def test_a_pool_is_as_large_as_asked_for(memory):
    memory(1)
    assert pool_bytes(InstanceConfig(hicache_size_gb=2.5), "cpu") == round(2.5 * GIB)
    assert pool_bytes(InstanceConfig(hicache_size_gb=0), "nvidia") == 0


@pytest.mark.parametrize(
    ("accelerator", "available", "ranks", "wanted"),
    [
        ("nvidia", 2000, 8, 32.0),
        ("nvidia", 128, 4, 16.0),
        ("cpu", 100, 1, 0.5),
        ("cpu", 4, 1, 0.2),
        ("cpu", 4, 2, 0.1),
        ("cpu", 0.5, 1, 0.0),
    ],
)
def test_the_default_leaves_memory_to_others(memory, accelerator, available, ranks, wanted):
    memory(available)
    size = pool_bytes(InstanceConfig(dp=ranks), accelerator)
    assert size / GIB == pytest.approx(wanted, abs=1e-6)


def test_the_fake_engine_has_a_cache_only_where_it_is_asked_for(memory):
    memory(100)
    assert pool_bytes(InstanceConfig(engine="fake"), "cpu") == 0
    assert pool_bytes(InstanceConfig(engine="fake", hicache_size_gb=1), "cpu") == GIB


def test_pools_that_do_not_fit_are_refused_before_anything_is_loaded(memory):
    memory(10)
    check_pools(InstanceConfig(hicache_size_gb=4, dp=2))
    with pytest.raises(ConfigurationError) as refused:
        check_pools(InstanceConfig(hicache_size_gb=6, dp=2))
    assert "12.0 GiB" in str(refused.value)
    assert "10.0 GiB" in str(refused.value)
    assert "--hicache-size-gb" in str(refused.value)


def test_closing_lets_go_of_every_segment():
    pools = HostPools("test", 3)
    descriptors = list(pools.descriptors)
    assert len(set(descriptors)) == 3
    pools.close()
    pools.close()
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(descriptor)
