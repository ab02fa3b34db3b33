"""Which device a worker computes on, and how much memory is left there."""

from __future__ import annotations

import os
from typing import Literal

import torch

from workers.contract import ModelLoadError
from workers.hardware.host_memory import available_host_memory

Accelerator = Literal["cpu", "nvidia"]
DTypeName = Literal["float32", "bfloat16", "float16"]


def open_device(accelerator: Accelerator, index: int, num_threads: int) -> torch.device:
    """Also sets the number of CPU threads and the current GPU.

    Raises:
        ModelLoadError: the GPU does not exist.
    """
    torch.set_num_threads(max(1, num_threads))
    if accelerator == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise ModelLoadError(
            f"GPU {index} was asked for, but PyTorch finds {found} CUDA GPUs; set the accelerator "
            "to 'cpu' or lower the number of workers."
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def default_dtype(device: torch.device, checkpoint: torch.dtype | None) -> DTypeName:
    """Resolve `auto`: float32 on a CPU, else the checkpoint's own type, with bfloat16 for float32."""
    if device.type == "cpu":
        return "float32"
    return "float16" if checkpoint == torch.float16 else "bfloat16"


def reserved_bytes(index: int) -> int:
    """GPU memory that this process has taken for tensors, including free blocks of its pool.

    Does not count the CUDA context itself, some hundred MiB.
    """
    return int(torch.cuda.memory_reserved(index))


def free_memory(device: torch.device) -> int:
    if device.type == "cpu":
        return available_host_memory()
    torch.cuda.empty_cache()  # what loading and trial steps left to PyTorch's own pool is free
    free, _ = torch.cuda.mem_get_info(device)
    return free


def offline_environment() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
