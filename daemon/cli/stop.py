"""`deepinfer stop`: end an instance, and return when nothing of it is left."""

from __future__ import annotations

import os
import select
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from daemon.config import ConfigFile, InstanceName, RunDir
from daemon.errors import DeepInferError
from daemon.inspection_client import InspectionClient
from daemon.run_directory import choose_run_directory, running_pid

CLEAN_UP_SECONDS = 40.0
"""Beyond the drain: TERM, KILL and the clean-up."""
DEFAULT_DRAIN_SECONDS = 600.0
"""How long to wait where the drain limit is the instance's own, which is not known here."""


def stop(
    *,
    instance: InstanceName = "default",
    run_dir: RunDir = None,
    config: ConfigFile = None,
    drain_timeout: Annotated[
        float | None,
        Parameter(help="Seconds that running requests get. Default: the instance's own setting."),
    ] = None,
) -> None:
    """Stop an instance: refuse new requests, let running ones end, end all processes."""
    del config  # read by the command line, for its --instance and --run-dir
    path = choose_run_directory(instance, run_dir)
    pid = running_pid(path)
    with InspectionClient(path, instance) as client:
        client.stop(drain_timeout)
    seconds = (DEFAULT_DRAIN_SECONDS if drain_timeout is None else drain_timeout) + CLEAN_UP_SECONDS
    if pid and not _ended(pid, seconds):
        raise DeepInferError(
            f"Instance {instance!r} (process {pid}) has not ended after {seconds:g} s: "
            f"read its log, or end it with `kill -9 {pid}`."
        )
    Console(highlight=False).print(f"Instance {instance!r} has stopped.")


def _ended(pid: int, seconds: float) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        return bool(poller.poll(seconds * 1000))
    finally:
        os.close(pidfd)
