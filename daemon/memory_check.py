"""Whether the weights of all workers fit into this machine's memory, from file sizes and headers.

A lower bound: pages, activations and the processes themselves come on top, so that what is refused
here could never have run. Nothing is read but the headers of the checkpoint's files.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import psutil

from daemon.config import InstanceConfig
from daemon.errors import ConfigurationError

FLOAT_BYTES: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
DTYPE_BYTES: Final = {"auto": 4, "float32": 4, "bfloat16": 2, "float16": 2}
"""In a CPU's memory, by --dtype."""
MAX_HEADER_BYTES: Final = 100_000_000
CGROUPS: Final = Path("/sys/fs/cgroup")
OWN_CGROUPS: Final = Path("/proc/self/cgroup")
GIB: Final = 1 << 30


class _Tensor(msgspec.Struct):
    """One entry of a file's header."""

    dtype: str = ""
    data_offsets: tuple[int, int] = (0, 0)


def check_memory(config: InstanceConfig, accelerator: str, model_dir: Path) -> None:
    """Whether the weights fit. On a GPU the worker plans its own memory.

    Raises:
        ConfigurationError: they do not.
    """
    if accelerator != "cpu":
        return
    one = sum(
        weight_bytes(path, DTYPE_BYTES[config.dtype]) for path in model_dir.glob("*.safetensors")
    )
    wanted, found = config.dp * one, available_bytes()
    if wanted > found:
        workers = f" for {config.dp} workers" if config.dp > 1 else ""
        advice = ", a smaller --dp" if config.dp > 1 else ""
        raise ConfigurationError(
            f"The weights in {model_dir} need {wanted / GIB:.1f} GiB of memory{workers}, but "
            f"{found / GIB:.1f} GiB are available: make room, or choose a smaller model{advice} "
            "or --dtype bfloat16."
        )


def weight_bytes(path: Path, float_bytes: int) -> int:
    """Memory of a file's tensors, in bytes, where its floating-point numbers take `float_bytes` each.

    The size of the file where its header tells nothing: the worker will say what is wrong with it.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = file.read(min(length, MAX_HEADER_BYTES))
        tensors = msgspec.json.decode(header, type=dict[str, _Tensor])
    except (OSError, struct.error, msgspec.MsgspecError, UnicodeDecodeError):
        return size
    spans = [(tensor.dtype, *tensor.data_offsets) for tensor in tensors.values()]
    if any(not 0 <= begin <= end <= size for _, begin, end in spans):
        return size
    return sum(
        (end - begin) * float_bytes // FLOAT_BYTES.get(dtype, float_bytes)
        for dtype, begin, end in spans
    )


def available_bytes() -> int:
    """Memory that can be had without swapping, in bytes: the machine's, or less by a cgroup's limit."""
    return min([psutil.virtual_memory().available, *_left_in_cgroups()])


def _left_in_cgroups() -> Iterator[int]:
    """Under each limit that holds for this process: its own cgroup's and those of its parents."""
    for folder, limit_name, usage_name in _memory_cgroups():
        for place in (folder, *folder.parents):
            if not place.is_relative_to(CGROUPS):
                break
            limit, used = _number(place / limit_name), _number(place / usage_name)
            if limit is not None and used is not None:
                yield max(limit - used + _file_cache(place), 0)


def _memory_cgroups() -> list[tuple[Path, str, str]]:
    """Our folders in the unified and in the old hierarchy, with the names of limit and usage."""
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found.append((CGROUPS / path.lstrip("/"), "memory.max", "memory.current"))
        elif "memory" in controllers.split(","):
            folder = CGROUPS / "memory" / path.lstrip("/")
            found.append((folder, "memory.limit_in_bytes", "memory.usage_in_bytes"))
    return found


def _number(path: Path) -> int | None:
    """None: no such file, or no limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _file_cache(folder: Path) -> int:
    """Bytes that count as used but are given back when needed."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split(" ", 1) for line in lines if " " in line)
    return sum(int(values.get(name, 0)) for name in ("active_file", "inactive_file"))
