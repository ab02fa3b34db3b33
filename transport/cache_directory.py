"""Where files are kept from one start to the next: the default model, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """`DEEPINFER_CACHE_DIR`, else `$XDG_CACHE_HOME/deepinfer`, else `~/.cache/deepinfer`.

    Raises:
        RuntimeError: neither variable is set, and the user has no home directory.
    """
    own = os.environ.get("DEEPINFER_CACHE_DIR", "")
    if own:
        return Path(own).expanduser().absolute()
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = shared if shared.is_absolute() else Path.home() / ".cache"
    return base / "deepinfer"
