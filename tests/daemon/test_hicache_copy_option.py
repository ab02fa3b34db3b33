"""`--hicache-copy` gets to the workers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from daemon.configuration.config import InstanceConfig
from daemon.instance.role_settings import child_specs, make_plan
from workers.settings import WorkerSettings


@pytest.mark.parametrize("choice", ["auto", "batch", "kernel"])
def test_every_worker_is_told_how_to_copy(choice, tmp_path):
    config = InstanceConfig(hicache_copy=choice, dp=2, accelerator="cpu")
    plan = make_plan(config, Path("model"), tmp_path, 1)
    told = [
        msgspec.json.decode(spec.settings, type=WorkerSettings).hicache_copy
        for spec in child_specs(plan, 3, [])
        if spec.role == "worker"
    ]
    assert told == [choice, choice]
