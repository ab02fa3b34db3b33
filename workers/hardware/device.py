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
    """The torch device of a worker; sets the number of CPU threads and the current GPU.

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
    """dtype for `auto`: float32 on a CPU; on a GPU the checkpoint's own, bfloat16 if float32."""
    if device.type == "cpu":
        return "float32"
    return "float16" if checkpoint == torch.float16 else "bfloat16"


def reserved_bytes(index: int) -> int:
    """Memory of a GPU that this process has taken for tensors, free blocks of its pool included.
    The CUDA context itself, some hundred MiB, is not counted."""
    return int(torch.cuda.memory_reserved(index))


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had where `device` computes."""
    if device.type == "cpu":
        return available_host_memory()
    torch.cuda.empty_cache()  # what loading and trial steps left to PyTorch's own pool is free
    free, _ = torch.cuda.mem_get_info(device)
    return free


def offline_environment() -> None:
    """Tell the Hugging Face libraries that nothing may be fetched."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
