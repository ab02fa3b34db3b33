"""What the device reaches at best: one large copy, one large product."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch

from daemon.cli.bench.engine.costs import Peaks

_COPY_BYTES: Final = {"cpu": 128 << 20, "cuda": 2 << 30}
_PRODUCT_SIZE: Final = {"cpu": 1024, "cuda": 8192}
_CALLS: Final = {"cpu": 1, "cuda": 10}
"""In one measurement; on a GPU the host's part is to vanish beside them."""
_ROUNDS: Final = 6


def measure_peaks(device: torch.device, dtype: torch.dtype) -> Peaks:
    """Products are of `dtype`. Takes 4 GiB of a GPU's memory, and gives it back."""
    copies, products = _copy_speed(device), _product_speed(device, dtype)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Peaks(copies, products)


def _copy_speed(device: torch.device) -> float:
    """Bytes that are read and written in a second."""
    size = _COPY_BYTES[device.type]
    source, target = (
        torch.zeros(size, dtype=torch.uint8, device=device).random_() for _ in range(2)
    )
    return 2 * size / _best_seconds(lambda: target.copy_(source), device)


def _product_speed(device: torch.device, dtype: torch.dtype) -> float:
    size = _PRODUCT_SIZE[device.type]
    left, right, out = (torch.randn(size, size, device=device).to(dtype) for _ in range(3))
    return 2 * size**3 / _best_seconds(lambda: torch.mm(left, right, out=out), device)


def _best_seconds(run: Callable[[], object], device: torch.device) -> float:
    calls = _CALLS[device.type]
    seconds: list[float] = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        for _ in range(calls):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append((time.perf_counter() - began) / calls)
    return min(seconds[1:])  # the first one loads kernels
