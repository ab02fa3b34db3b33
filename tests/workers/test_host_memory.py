"""What may still be taken of a machine's memory."""

import resource
from types import SimpleNamespace

import psutil
import pytest

from transport.wording import GIB
from workers.hardware import host_memory
from workers.hardware.host_memory import available_host_memory, oom_kills


@pytest.mark.parametrize("unified", [True, False])
def test_the_tightest_cgroup_counts_and_file_cache_is_free(tmp_path, monkeypatch, unified):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * GIB))
    monkeypatch.setattr(host_memory, "OWN_CGROUPS", tmp_path / "none")
    assert available_host_memory() == 8 * GIB
    line, root = ("0::/a/b", tmp_path) if unified else ("4:memory:/a/b", tmp_path / "memory")
    limit, usage = (
        ("memory.max", "memory.current")
        if unified
        else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / limit).write_text("max\n" if unified else f"{1 << 62}\n")
    (root / "a" / "b" / usage).write_text("5\n")
    (root / "a" / limit).write_text(f"{3 * GIB}\n")
    (root / "a" / usage).write_text(f"{2 * GIB}\n")
    (root / "a" / "memory.stat").write_text(f"anon 7\ninactive_file {GIB}\nactive_file 0\n")
    (tmp_path / "own").write_text(f"1:name=systemd:/\n{line}\n")
    monkeypatch.setattr(host_memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(host_memory, "OWN_CGROUPS", tmp_path / "own")
    assert available_host_memory() == 2 * GIB


@pytest.mark.parametrize("unified", [True, False])
def test_kills_for_memory_are_those_of_the_nearest_cgroup_that_counts(
    tmp_path, monkeypatch, unified
):
    line, root = ("0::/a/b", tmp_path) if unified else ("4:memory:/a/b", tmp_path / "memory")
    events = "memory.events" if unified else "memory.oom_control"
    (tmp_path / "own").write_text(f"1:name=systemd:/\n{line}\n")
    (tmp_path / "vmstat").write_text("pgfault 5\noom_kill 9\n")
    monkeypatch.setattr(host_memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(host_memory, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(host_memory, "VMSTAT", tmp_path / "vmstat")
    assert oom_kills() == (9, tmp_path / "vmstat")
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / events).write_text("oom 4\noom_kill 3\n")
    assert oom_kills() == (3, root / "a" / events)
    (root / "a" / "b" / events).write_text("oom 4\noom_kill 2\noom_group_kill 7\n")
    assert oom_kills() == (2, root / "a" / "b" / events)


def test_kills_for_memory_that_nobody_counts_are_none(tmp_path, monkeypatch):
    monkeypatch.setattr(host_memory, "OWN_CGROUPS", tmp_path / "none")
    monkeypatch.setattr(host_memory, "VMSTAT", tmp_path / "none")
    assert oom_kills().total == 0


def test_a_limit_on_the_address_space_counts(monkeypatch, tmp_path):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 50))
    monkeypatch.setattr(host_memory, "OWN_CGROUPS", tmp_path / "none")
    own = psutil.Process().memory_info().vms
    monkeypatch.setattr(resource, "getrlimit", lambda _: (own + 8 * GIB, -1))
    assert 7 * GIB < available_host_memory() <= 8 * GIB
    monkeypatch.setattr(resource, "getrlimit", lambda _: (GIB // 1024, -1))
    assert available_host_memory() == 0
