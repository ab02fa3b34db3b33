"""A fabricated instance: children with snapshots, but without processes behind them."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from daemon.supervision.child_process import ChildSpec
from daemon.supervision.instance_view import InstanceView
from daemon.supervision.supervisor import Child
from transport.ids import ProcessName
from transport.messages.telemetry import Snapshot

NOW = 1000.0


@pytest.fixture(scope="session")
def make_child() -> Callable[..., Child]:
    """A child that has sent `snapshot` 0.2 s ago and was started 100 s ago; a living one has this
    test's own pid, so that there is something to measure."""

    def make(snapshot: Snapshot | None = None, alive: bool = True, **fields) -> Child:
        name = fields.pop("name", snapshot.name if snapshot else "worker/0")
        child = Child(ChildSpec(ProcessName(name), name.partition("/")[0], "none", b"{}"))
        if alive:
            child.process = SimpleNamespace(pid=os.getpid(), started_at=NOW - 100)
            child.state = snapshot.state if snapshot else None
            child.snapshot = child.last_snapshot = snapshot
            child.snapshot_at = child.progress_at = NOW - 0.2
        for field, value in fields.items():
            setattr(child, field, value)
        return child

    return make


@pytest.fixture(scope="session")
def make_view() -> Callable[..., InstanceView]:
    """An instance of these children."""

    def make(*children: Child, **fields) -> InstanceView:
        values = dict(
            instance="default",
            state="ready",
            reason="",
            pid=os.getpid(),
            url="http://127.0.0.1:8888",
            model_name="SmolLM2-135M-Instruct",
            accelerator="cpu",
            run_dir="/run/deepinfer/default",
            started_at=NOW - 3723,
            now=NOW,
            children={child.name: child for child in children},
        )
        return InstanceView(**{**values, **fields})

    return make
