"""Which accelerator this machine has, found out without importing torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from workers.settings import Accelerator

_DEVICE = re.compile(r"nvidia[0-9]+")


def nvidia_devices(
    dev: Path = Path("/dev"), environment: Mapping[str, str] | None = None
) -> list[str]:
    """Names of the usable GPUs as CUDA_VISIBLE_DEVICES takes them; empty if there are none.

    Obeys a CUDA_VISIBLE_DEVICES that is already set.
    """
    environment = os.environ if environment is None else environment
    try:
        present = sorted(
            (entry.name for entry in dev.iterdir() if _DEVICE.fullmatch(entry.name)),
            key=lambda name: int(name.removeprefix("nvidia")),
        )
    except OSError:
        present = []
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()] if present else []
    # CUDA numbers the devices that it can see from 0, whatever their files are called.
    return [str(number) for number in range(len(present))]


def detect_accelerator() -> Accelerator:
    return "nvidia" if nvidia_devices() else "cpu"


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))
