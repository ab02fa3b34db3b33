"""Compiled kernels, kept on disk from one start to the next.

A file is named after a hash of everything that it depends on, holds the cubin and, before it, a hash of
that; it appears whole or not at all. Whatever else is found under its name is compiled anew.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Final

from transport.cache_directory import cache_directory

CUBIN_HASH_BYTES: Final = 32

_log = logging.getLogger(__name__)


def kernel_folder() -> Path | None:
    try:
        return cache_directory() / "kernels"
    except RuntimeError:  # a user without a home
        return None


def cached_cubin(
    folder: Path | None,
    source: str,
    architecture: str,
    compiler: str,
    compile_it: Callable[[], bytes],
) -> bytes:
    """The cubin of `source`, from disk where it is there and whole.

    Args:
        folder: where to look and to leave it; made if missing. None, or one that cannot be written,
            costs a compilation at each start.
        source: CUDA C++.
        architecture: such as sm_90.
        compiler: name and version of what `compile_it` uses.
        compile_it: makes the cubin; its exceptions pass.
    """
    if folder is None:
        return compile_it()
    key = blake2b("\0".join((source, architecture, compiler)).encode(), digest_size=16)
    path = folder / f"{key.hexdigest()}.cubin"
    kept = _read(path)
    if kept is not None:
        return kept
    cubin = compile_it()
    try:
        _write(path, cubin)
    except OSError as error:
        _log.warning("The compiled kernel cannot be kept in %s: %s.", folder, error.strerror)
    return cubin


def _read(path: Path) -> bytes | None:
    try:
        found = path.read_bytes()
    except OSError:
        return None
    digest, cubin = found[:CUBIN_HASH_BYTES], found[CUBIN_HASH_BYTES:]
    if cubin and digest == _digest(cubin):
        return cubin
    _log.warning("The compiled kernel %s is damaged; it is compiled anew.", path)
    return None


def _write(path: Path, cubin: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(prefix=".", suffix=".part", dir=path.parent)
    part = Path(name)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(_digest(cubin) + cubin)
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def _digest(cubin: bytes) -> bytes:
    return blake2b(cubin, digest_size=CUBIN_HASH_BYTES).digest()
