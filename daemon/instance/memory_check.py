"""Whether the weights of all workers fit into this machine's memory, from the headers of their files.

A lower bound: pages, activations and the processes themselves come on top, so that what is refused
here could never have run. Tables that stay in their files (DeepSeek's Engram) are not counted, nor are
files beside them that nothing is read from.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from daemon.configuration.config import InstanceConfig
from daemon.errors import ConfigurationError
from transport.wording import GIB
from workers.hardware.host_memory import available_host_memory
from workers.models.deepseek_v41.weights.tensor_table import is_engram_table
from workers.models.safetensors_header import StoredTensor

FLOAT_BYTES: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
DTYPE_BYTES: Final = {"auto": 4, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a float in a CPU's memory, by --dtype."""


def check_memory(config: InstanceConfig, accelerator: str, model_dir: Path, one: int) -> None:
    """Whether the weights fit, which take `one` bytes in each worker. On a GPU that plans its own memory.

    Raises:
        ConfigurationError: they do not.
    """
    if accelerator != "cpu":
        return
    wanted, found = config.dp * one, available_host_memory()
    if wanted > found:
        workers = f" for {config.dp} workers" if config.dp > 1 else ""
        advice = ", a smaller --dp" if config.dp > 1 else ""
        raise ConfigurationError(
            f"The weights in {model_dir} need {wanted / GIB:.1f} GiB of memory{workers}, but "
            f"{found / GIB:.1f} GiB are available: make room, or choose a smaller model{advice} "
            "or --dtype bfloat16."
        )


def weight_bytes(tensors: Iterable[StoredTensor], float_bytes: int) -> int:
    """Memory of a file's tensors, in bytes, where its floating-point numbers take `float_bytes` each."""
    return sum(
        tensor.size * float_bytes // FLOAT_BYTES.get(tensor.dtype, float_bytes)
        for tensor in tensors
        if not is_engram_table(tensor.key)
    )
