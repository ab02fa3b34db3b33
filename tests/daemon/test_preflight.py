"""What fails before any process is started, in one sentence that says what to do."""

from __future__ import annotations

import os
import resource

import numpy as np
import pytest
from safetensors.numpy import save_file

from daemon.configuration.config import InstanceConfig
from daemon.errors import ConfigurationError, DeepInferError
from daemon.instance import preflight
from daemon.instance.model_check import check_model
from daemon.instance.preflight import (
    check_devices,
    check_thread_limit,
    find_model,
    raise_descriptor_limit,
)


@pytest.fixture
def checkpoint(tmp_path):
    """A directory that looks like a checkpoint."""
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    save_file({"w": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def find(path) -> None:
    directory = find_model(str(path), pytest.fail)
    check_model(InstanceConfig(), "cpu", directory)


def test_a_checkpoint_is_found_also_by_a_relative_path(checkpoint, monkeypatch):
    monkeypatch.chdir(checkpoint.parent)
    assert find_model(checkpoint.name, pytest.fail) == checkpoint
    find(checkpoint)


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ("config.json", "config.json"),
        ("tokenizer.json", "no tokenizer"),
        ("model.safetensors", "no weights"),
    ],
)
def test_a_missing_file_is_named(checkpoint, missing, told):
    (checkpoint / missing).unlink()
    with pytest.raises(ConfigurationError, match=told) as caught:
        find(checkpoint)
    assert str(checkpoint) in str(caught.value)


def test_no_such_path_is_not_taken_for_a_hub_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="does not exist"):
        find("org/model")


def test_a_file_is_no_model(checkpoint):
    with pytest.raises(ConfigurationError, match="is a file"):
        find(checkpoint / "config.json")


def test_a_hub_cache_directory_gets_a_hint(tmp_path):
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    with pytest.raises(ConfigurationError, match=f"Did you mean {snapshot}"):
        find(tmp_path)


def test_a_file_that_leads_nowhere_is_named(checkpoint):
    """As in a hub cache whose blobs were removed."""
    shard = checkpoint / "model-2.safetensors"
    shard.symlink_to(checkpoint / "gone")
    with pytest.raises(ConfigurationError, match="cannot be read") as caught:
        find(checkpoint)
    assert str(shard) in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_directory_is_named(checkpoint):
    checkpoint.chmod(0)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        find(checkpoint)
    checkpoint.chmod(0o700)


def test_more_workers_than_devices(monkeypatch):
    monkeypatch.setattr(preflight, "nvidia_devices", lambda: ["0"])
    check_devices(InstanceConfig(dp=1), "nvidia")
    check_devices(InstanceConfig(dp=2), "cpu")
    with pytest.raises(ConfigurationError, match="needs 2 GPUs, but 1"):
        check_devices(InstanceConfig(dp=2), "nvidia")


def test_the_soft_limit_on_files_is_lifted(monkeypatch):
    limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (256, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _kind, limit: limits.append(limit))
    raise_descriptor_limit(InstanceConfig())
    assert limits == [(4096, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (64, 64))
    with pytest.raises(DeepInferError, match="ulimit -n"):
        raise_descriptor_limit(InstanceConfig())


@pytest.fixture
def thread_limit(monkeypatch):
    """thread_limit(n): as a user with 50 threads who may have n."""

    def set_limit(limit: int) -> None:
        monkeypatch.setattr(preflight, "_threads_of_this_user", lambda: 50)
        monkeypatch.setattr(preflight, "_may_exceed_limits", lambda: False)
        monkeypatch.setattr(resource, "getrlimit", lambda _kind: (10, limit))
        monkeypatch.setattr(resource, "setrlimit", lambda _kind, _limit: None)

    return set_limit


def test_too_few_threads_are_refused(thread_limit):
    thread_limit(resource.RLIM_INFINITY)
    check_thread_limit(InstanceConfig())
    thread_limit(1000)
    check_thread_limit(InstanceConfig(engine="fake"))
    with pytest.raises(DeepInferError, match=r"may have 1000 threads and has 50.*ulimit -u"):
        check_thread_limit(InstanceConfig(engine="fake", frontends=200))
    thread_limit(60)
    with pytest.raises(DeepInferError, match=r"may have 60 threads"):
        check_thread_limit(InstanceConfig(engine="fake"))


def test_root_is_not_held_to_the_limit_on_threads(thread_limit, monkeypatch):
    thread_limit(1)
    monkeypatch.setattr(preflight, "_may_exceed_limits", lambda: True)
    check_thread_limit(InstanceConfig())


def test_a_model_below_a_directory_that_is_not_utf8_is_named(tmp_path, monkeypatch):
    folder = os.fsencode(tmp_path) + b"/caf\xe9"
    os.makedirs(folder + b"/model")
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigurationError, match=r"caf.*xe9/model' is not UTF-8"):
        find_model("model", print)
