"""`deepinfer stop`: end an instance, and return when nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from daemon.cli.output import sentence_console, unfailing_output
from daemon.cli.target import DEFAULT_TARGET, Target
from daemon.errors import DeepInferError
from daemon.inspection.inspection_client import InspectionClient
from daemon.system.run_directory import (
    PID_FILE,
    has_ended,
    holds_lock,
    instance_name,
    not_running,
    running_pid,
)
from transport.sockets import Endpoints

CLEAN_UP_SECONDS = 40.0
"""Beyond the drain: TERM, KILL and the clean-up."""
DEFAULT_DRAIN_SECONDS = 600.0
"""How long to wait where the drain limit is the instance's own, which is not known here."""


@unfailing_output()
def stop(
    *,
    target: Target = DEFAULT_TARGET,
    drain_timeout: Annotated[
        float | None,
        Parameter(help="Seconds that running requests get. Default: the instance's own setting."),
    ] = None,
) -> None:
    """Stop an instance: refuse new requests, let running ones end, end all processes."""
    path = target.find()
    pid = running_pid(path)
    if pid is None:
        raise DeepInferError(not_running(path, target.instance))
    instance = instance_name(path, target.instance)
    seconds = (DEFAULT_DRAIN_SECONDS if drain_timeout is None else drain_timeout) + CLEAN_UP_SECONDS
    try:
        pidfd = os.pidfd_open(pid)
    except (ProcessLookupError, ValueError):
        raise DeepInferError(
            f"Instance {instance!r} is just starting or ending: try again in a moment."
        ) from None
    try:
        # With the pidfd open: the number cannot become another process's any more.
        if not holds_lock(pid, path):
            raise DeepInferError(
                f"Process {pid}, which {path / PID_FILE} names, is not the daemon of instance "
                f"{instance!r}: nothing was stopped. Try again in a moment, from where it was started."
            )
        _ask(path, instance, pidfd, drain_timeout)
        if not has_ended(pidfd, seconds):
            raise DeepInferError(
                f"Instance {instance!r} (process {pid}) has not ended after {seconds:g} s: "
                f"read its log, or end it with `kill -9 {pid}`."
            )
    finally:
        os.close(pidfd)
    sentence_console().print(f"Instance {instance!r} has stopped.")


def _ask(path: Path, instance: str, pidfd: int, drain_timeout: float | None) -> None:
    if not Path(Endpoints(str(path)).control.removeprefix("ipc://")).exists():
        # It is still fetching or checking: nothing to drain, and only signals are listened to.
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        return
    try:
        with InspectionClient(path, instance) as client:
            client.stop(drain_timeout)
    except DeepInferError:
        if not has_ended(pidfd, 0.0):
            raise
