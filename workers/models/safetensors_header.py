"""Reads what a safetensors file says it holds, and checks that the file is all there.

The format: 8 bytes little-endian length, that many bytes of JSON, then the data.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Final

from workers.contract import ModelLoadError

if TYPE_CHECKING:
    from pathlib import Path

_ITEM_BYTES: Final = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
_LENGTH_BYTES: Final = 8
_MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of the format's own library."""
_LFS_POINTER: Final = b"version https://git-lfs"


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies, according to its file's header."""

    file: Path
    key: str
    """Its name in the file."""
    dtype: str
    """The format's name for it: `BF16`, `F8_E4M3`, ..."""
    shape: tuple[int, ...]
    offset: int
    """Position of its first byte in the file."""
    size: int
    """Size in bytes."""


def read_header(file: Path) -> list[StoredTensor]:
    """Return the tensors of `file` in byte order.

    Raises:
        ModelLoadError: the file is missing, a pointer to the real file, truncated or damaged.
    """
    try:
        actual = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(_LENGTH_BYTES)
            if _LFS_POINTER.startswith(start) and start:
                raise ModelLoadError(
                    f"{file} is only a Git LFS pointer: fetch the real file with 'git lfs pull'."
                )
            length = int.from_bytes(start, "little")
            if (
                len(start) < _LENGTH_BYTES
                or _LENGTH_BYTES + min(length, _MAX_HEADER_BYTES) > actual
            ):
                raise ModelLoadError(
                    f"{file} is truncated or no safetensors file: it ends within its header, at "
                    f"{actual} bytes; fetch it again."
                )
            if length > _MAX_HEADER_BYTES:
                raise ModelLoadError(
                    f"{file} is damaged or no safetensors file: its header would have {length} bytes."
                )
            header = json.loads(stream.read(length))
    except FileNotFoundError as error:
        raise ModelLoadError(f"{file} is missing: the checkpoint is incomplete.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file} is damaged or no safetensors file: {error}.") from error
    tensors = _tensors(file, header, _LENGTH_BYTES + length)
    end = max((t.offset + t.size for t in tensors), default=_LENGTH_BYTES + length)
    if end > actual:
        raise ModelLoadError(
            f"{file} is truncated: its header promises {end} bytes, it has {actual}; fetch it again."
        )
    if end < actual:
        raise ModelLoadError(
            f"{file} is damaged: its header promises {end} bytes, it has {actual}; fetch it again."
        )
    return tensors


def _tensors(file: Path, header: object, data_start: int) -> list[StoredTensor]:
    try:
        if not isinstance(header, dict):
            raise TypeError("no JSON object")
        found = []
        for key, entry in header.items():
            if key == "__metadata__":
                continue
            begin, end = map(int, entry["data_offsets"])
            shape = tuple(int(extent) for extent in entry["shape"])
            if not 0 <= begin <= end or min(shape, default=0) < 0:
                raise ValueError(f"{key} has a negative size")
            found.append(
                StoredTensor(file, key, str(entry["dtype"]), shape, data_start + begin, end - begin)
            )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ModelLoadError(
            f"The header of {file} is damaged ({error}); fetch it again."
        ) from error
    for tensor in found:
        item = _ITEM_BYTES.get(tensor.dtype)
        if item is not None and prod(tensor.shape) * item != tensor.size:
            raise ModelLoadError(
                f"The header of {file} is damaged: {tensor.key} of shape {list(tensor.shape)} and "
                f"type {tensor.dtype} cannot have {tensor.size} bytes."
            )
    return sorted(found, key=lambda tensor: tensor.offset)
