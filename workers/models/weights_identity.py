"""Which weights a model has, for the fingerprint of what a prefix cache stores."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from workers.models.weight_files import weight_files

_WEIGHT_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 64 * 1024


def weights_identity(model_dir: Path) -> str:
    """Digest of the files that weights are read from: sizes, headers and evenly spread samples.

    These tell two fine-tunes of one architecture apart without reading every byte.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(weight_files(model_dir)):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        with path.open("rb") as file:
            for sample in range(_WEIGHT_SAMPLES):
                position = sample * size // _WEIGHT_SAMPLES
                file.seek(position)
                digest.update(file.read(_SAMPLE_BYTES))
                if size <= _SAMPLE_BYTES:
                    break
    return digest.hexdigest()
